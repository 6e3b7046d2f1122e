"""Makes a function an operator of PyTorch's, opaque to torch.compile."""

import torch


def register(name, forward, fake, backward=None, keep=None):
    """Registers forward, whose parameters have types and of which it changes none, and returns the operator.

    name: "namespace::name". fake: forward without arithmetic, for the compiler. backward and keep, if the operator has
    a gradient: the backward and setup_context of torch.library.register_autograd.

    torch.library.custom_op does the same, but a call of its operators loads the compiler, even if nothing is compiled.
    """
    schema = torch.library.infer_schema(forward, mutates_args=())
    torch.library.define(name, schema, tags=torch.Tag.pt2_compliant_tag)
    torch.library.impl(name, "default", forward)
    torch.library.register_fake(name, fake)
    if backward:
        torch.library.register_autograd(name, backward, setup_context=keep)
    namespace, name = name.split("::")
    return getattr(getattr(torch.ops, namespace), name).default
