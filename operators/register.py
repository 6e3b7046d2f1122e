"""Makes a function a PyTorch operator, opaque to torch.compile."""

import torch


def register(name, forward, fake, backward=None, keep=None):
    """Registers forward as an operator and returns it. Its parameters need type annotations; it must not modify them.

    name: "namespace::name". fake: returns empty tensors like forward's results, for the compiler. backward and keep, if
    the operator has a gradient: backward and setup_context of torch.library.register_autograd.

    torch.library.custom_op does the same, but calling its operators loads the compiler even if nothing is compiled.
    """
    schema = torch.library.infer_schema(forward, mutates_args=())
    torch.library.define(name, schema, tags=torch.Tag.pt2_compliant_tag)
    torch.library.impl(name, "default", forward)
    torch.library.register_fake(name, fake)
    if backward:
        torch.library.register_autograd(name, backward, setup_context=keep)
    namespace, name = name.split("::")
    return getattr(getattr(torch.ops, namespace), name).default
