"""Names of a machine, made of its facts (lab/predict/devices.py: describe)."""


def machine_name(machine: dict) -> str:
    """A folder's name for a machine, such as intel-xeon-2-threads-amx or nvidia-h200."""
    units = " amx" if machine.get("amx") else " bf16" * machine["native_bfloat16"]
    cpu = f"{processor(machine)} {machine['threads']} threads{units}"
    name = machine["gpu"] or cpu
    return "-".join("".join(c if c.isalnum() else " " for c in name).lower().split())


def machine_in_words(on: dict) -> str:
    """Describes the machine: its GPU, or its CPU with the features that matter for speed."""
    units = ", AMX" if on.get("amx") else ", native bfloat16" * on["native_bfloat16"]
    threads = f"{on['threads']} thread" if on["threads"] == 1 else f"{on['threads']} threads"
    return on["gpu"] or f"{processor(on)}, {threads}{units}"


def processor(machine):
    """The CPU's name, without words that every CPU's name contains."""
    return machine["cpu"].replace("(R)", "").replace(" Processor", "")
