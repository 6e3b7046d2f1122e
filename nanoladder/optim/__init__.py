"""How gradients change the weights: the optimizer."""

import math

import torch

from nanoladder import machine, parallel

# The learning rate that suits an optimizer, as a multiple of AdamW's: by its paper where that says one, else by
# `profile.py --mode=optimizers`, whose table in results/ has every optimizer around it.
RELATIVE_LR = {
    "sgd": 100.0,
    "adafactor": 30.0,  # its rate is relative to a matrix's own size, about 0.02
    "muon": 2.0,  # Liu et al. 2025 scale updates for 1; 600 thousand tokens are better at 6
    "lion": 0.3,  # Chen et al. 2023 take 0.1 to 0.3
    "galore": 1.0,  # with GALORE_SCALE; 600 thousand tokens are better at 3
}
LION_BETA2 = 0.99  # Chen et al. 2023, table 12
GALORE_RANK = 1 / 4  # of a matrix's smaller side; Zhao et al. 2024 take a quarter to a half
GALORE_GAP = 200  # steps between new subspaces
GALORE_SCALE = 1.0  # of the update; theirs, 0.25, goes with a learning rate some four times AdamW's


def lr_factor(config):
    """What learning_rate and min_lr, which are AdamW's, are multiplied by."""
    return RELATIVE_LR.get(config.optimizer, 1.0)


def batch_factor(config):
    """How lr_scaling multiplies a learning rate that suits batches of lr_reference_batch.

    linear: by the ratio of the batches, for SGD (Goyal et al. 2017); sqrt: by its root, which keeps the noise of a step
    as it was (Krizhevsky 2014), as Adam-like optimizers have to (Malladi et al. 2022).
    """
    if config.lr_scaling == "none":
        return 1.0
    ratio = config.batch_size / config.lr_reference_batch
    return ratio if config.lr_scaling == "linear" else math.sqrt(ratio)


def adamw8bit(groups, config):
    """AdamW whose two averages take 8 bits a number, scaled in blocks of 256 (Dettmers et al. 2022)."""
    options = {"lr": config.learning_rate, "betas": (config.beta1, config.beta2)}
    if machine.eight_bit_library(groups[0]["params"][0].device) == "bitsandbytes":
        from bitsandbytes.optim import AdamW8bit

        return AdamW8bit(groups, **options)
    from torchao.optim import AdamW8bit

    optimizer = AdamW8bit(groups, **options)
    optimizer.register_step_pre_hook(lr_to_tensor)
    if not config.compile:  # torchao compiles its update
        optimizer.step = torch.compiler.set_stance("force_eager")(optimizer.step)
    return optimizer


def lr_to_tensor(optimizer, *_):
    """Makes the learning rate a tensor: a compiled update takes a number for a constant."""
    for group in optimizer.param_groups:
        group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32)


def other_optimizer(groups, blocks, config):
    """The optimizer of that name over two groups, decayed matrices and the rest, of a model with these blocks.

    A step shrinks the weights by as much as AdamW's would, whatever the learning rate.
    """
    groups = [{**group, "weight_decay": group["weight_decay"] / lr_factor(config)} for group in groups]
    if config.optimizer == "sgd":
        for group in groups:
            group["weight_decay"] *= 1 - config.beta1  # it goes through the momentum, which adds it up
        momentum = {"momentum": config.beta1, "nesterov": config.beta1 > 0}
        return torch.optim.SGD(groups, lr=config.learning_rate, **momentum, foreach=False)  # one update in memory
    if config.optimizer == "adafactor":
        return torch.optim.Adafactor(groups, lr=config.learning_rate, foreach=False)  # one update in memory
    if config.optimizer == "lion":
        return Lion(groups, config.learning_rate, (config.beta1, LION_BETA2))
    hidden, rest = hidden_and_rest(groups, blocks)
    betas = config.beta1, config.beta2
    if config.optimizer == "muon":
        # Updates as large as AdamW's usually are (Liu et al. 2025): one learning rate for both
        first = torch.optim.Muon(hidden, lr=config.learning_rate, adjust_lr_fn="match_rms_adamw")
    else:
        first = GaLore(hidden, config.learning_rate, betas)
    implementation = {name: config.adamw_impl == name for name in ("foreach", "fused")}
    return Combined(first, torch.optim.AdamW(rest, lr=config.learning_rate, betas=betas, **implementation))


def hidden_and_rest(groups, blocks):
    """The groups cut in two lists of groups: the matrices of the blocks, and all else."""
    inside = set(blocks.parameters())
    decayed, others = groups
    hidden = [parameter for parameter in decayed["params"] if parameter in inside]
    outside = [parameter for parameter in decayed["params"] if parameter not in inside]
    return [{**decayed, "params": hidden}], [{**decayed, "params": outside}, others]


class Combined(torch.optim.Optimizer):
    """Several optimizers that work as one, each on the groups it came with."""

    def __init__(self, *optimizers):
        for number, optimizer in enumerate(optimizers):
            for group in optimizer.param_groups:
                group["by"] = number
        super().__init__([group for optimizer in optimizers for group in optimizer.param_groups], {})
        self.optimizers = optimizers

    def step(self):
        for number, optimizer in enumerate(self.optimizers):
            optimizer.param_groups = [group for group in self.param_groups if group["by"] == number]
            optimizer.state = self.state
            optimizer.step()


class Lion(torch.optim.Optimizer):
    """The sign of an average of gradients is the update (Chen et al. 2023, algorithm 2); state: one number each."""

    def __init__(self, groups, lr, betas):
        super().__init__(groups, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not parameters:
                continue
            gradients = [parameter.grad for parameter in parameters]
            for parameter in parameters:
                if not self.state[parameter]:
                    self.state[parameter]["mean"] = torch.zeros_like(parameter)
            means = [self.state[parameter]["mean"] for parameter in parameters]
            beta1, beta2 = group["betas"]
            updates = torch._foreach_lerp(gradients, means, beta1)
            torch._foreach_sign_(updates)
            torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(parameters, updates, alpha=-group["lr"])
            torch._foreach_lerp_(means, gradients, 1 - beta2)


class GaLore(torch.optim.Optimizer):
    """AdamW in the subspace of a matrix's largest singular vectors (Zhao et al. 2024, algorithm 2). Experimental.

    Of a matrix (m, n), m <= n, the state is the basis (m, r) and two averages (r, n); likewise where m > n.
    """

    def __init__(self, groups, lr, betas):
        super().__init__(groups, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, group)

    def update(self, parameter, group):
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        wide = parameter.shape[0] <= parameter.shape[1]
        weight, gradient = (parameter, parameter.grad) if wide else (parameter.T, parameter.grad.T)  # (m, n), m <= n
        step = state["step"] = state.get("step", 0) + 1
        if step % GALORE_GAP == 1:
            rank = max(1, round(GALORE_RANK * len(gradient)))
            finite = gradient.nan_to_num()  # a step that is not, which a GPU takes all the same, is named by faults.py
            left, _, _ = torch.linalg.svd(finite, full_matrices=False)
            state["basis"] = left[:, :rank].clone()  # (m, r); the rest of left is freed
        projected = state["basis"].T @ gradient  # (r, n)
        if step == 1:
            state["mean"], state["square"] = torch.zeros_like(projected), torch.zeros_like(projected)
        mean = state["mean"].lerp_(projected, 1 - beta1)
        square = state["square"].mul_(beta2).addcmul_(projected, projected, value=1 - beta2)
        scale = (square / (1 - beta2**step)).sqrt_().add_(1e-8)
        update = mean / (1 - beta1**step) / scale
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.add_(state["basis"] @ update, alpha=-group["lr"] * GALORE_SCALE)


# -- the update as each gradient arrives


def update_in_backward(optimizer):
    """Updates a parameter as soon as its gradient is there, and frees the gradient (Lv et al. 2023).

    The optimizer and its state are those of the update after the backward. optimizer.norms has each gradient's norm.
    """
    optimizer.norms = []
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            parameter.register_post_accumulate_grad_hook(lambda p, number=number: update_one(optimizer, number, p))


def update_one(optimizer, number, parameter):
    """The optimizer's step on one parameter, of the group with that number."""
    optimizer.norms.append(torch.linalg.vector_norm(parameter.grad))
    groups = optimizer.param_groups
    optimizer.param_groups = [{**groups[number], "params": [parameter]}]
    optimizer.step()
    optimizer.param_groups = groups
    parameter.grad = None


def norm_of_updates(optimizer):
    """The global norm of the gradients that were used since the last call."""
    norm = torch.linalg.vector_norm(torch.stack(optimizer.norms))
    optimizer.norms.clear()
    return norm


# -- the state in a file


def to_plain(state):
    """Optimizer state, {parameter: {name: value}}, each 8-bit tensor as a dict of the plain ones it is made of."""
    return {index: {name: plain_parts(value) for name, value in values.items()} for index, values in state.items()}


def in_8_bits(state):
    """Whether any of an optimizer's state is."""
    return any(isinstance(value, dict) for values in to_plain(state).values() for value in values.values())


@torch.no_grad()
def plain_parts(value):
    """{codes, scale, qmap, signed} of an 8-bit tensor, sharded if it is; any other value as it is."""
    local = value.to_local() if hasattr(value, "to_local") else value
    if not hasattr(local, "codes"):
        return value
    codes, scale = parallel.shards([local.codes, local.scale], value)
    return {"codes": codes, "scale": scale, "qmap": local.qmap, "signed": local.signed}


def from_plain(value, parameter):
    """What this process holds of a value that to_plain put into a checkpoint, of the state of a parameter."""
    if not isinstance(value, dict):
        return parallel.part(value, parameter)
    machine.eight_bit_library(parameter.device)
    from torchao.optim.subclass_8bit import OptimState8bit

    whole = OptimState8bit(**value)
    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    if local.numel() % whole.block_size:  # a shard would end within a block
        return parallel.part(whole.dequantize(), parameter)
    own = [parallel.own_rows(value[name], parameter) for name in ("codes", "scale")]
    return parallel.shards([OptimState8bit(*own, value["qmap"], value["signed"])], parameter)[0]
