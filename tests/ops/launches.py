"""Launch options of kernels as on a GPU with PDL, on a machine without one."""

from cairn.ops import gpu
from cairn.ops.gpu import tl


class Launched:
    """A fake kernel that is not run; it records its launches.

    Attributes:
        pdl: of each launch, whether it uses PDL.
        given: of each launch, the keyword arguments.
    """

    def __init__(self, kernel):
        self.arg_names, self.pdl, self.given = kernel.arg_names, [], []

    def __getitem__(self, grid):
        def launch(*args, **options):
            self.pdl.append(options.get("launch_pdl", False))
            self.given.append(dict(zip(self.arg_names, args, strict=False)) | options)

        return launch


def on_hopper(monkeypatch, module, *kernels):
    """Fake kernels of a module, on a device with PDL."""
    monkeypatch.setattr(gpu, "supports_pdl", lambda device: True)
    stands = [Launched(getattr(module, name)) for name in kernels]
    for name, stand in zip(kernels, stands, strict=True):
        monkeypatch.setattr(module, name, stand)
    return stands


def as_if_pdl(monkeypatch):
    """Interpreted kernels run as with PDL, including reads before they wait. Waits and prefetches
    have no effect."""
    monkeypatch.setattr(gpu, "supports_pdl", lambda device: True)
    for name in ("gdc_wait", "gdc_launch_dependents"):
        monkeypatch.setattr(tl.extra.cuda, name, lambda: None)
    monkeypatch.setattr(tl, "inline_asm_elementwise", _unchanged)


def _unchanged(asm, constraints, args, *types, **options):
    """What kernels have the machine do before they wait gives back what it is given, if at all."""
    return args[0]
