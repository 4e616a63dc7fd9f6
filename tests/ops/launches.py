"""Kernels that are not run: what they would be launched with is written down."""

from cairn.ops import gpu


class Launched:
    """A kernel's stand-in.

    Attributes:
        early: of every launch, whether it may begin before the kernel in front is done.
        args: of every launch, what the kernel was given.
    """

    def __init__(self):
        self.early, self.args = [], []

    def __getitem__(self, grid):
        def launch(*args, **options):
            self.early.append(options.get("launch_pdl", False))
            self.args.append(args)

        return launch


def on_hopper(monkeypatch, module, *kernels):
    """Stand-ins of a module's kernels, on a device that can launch them early."""
    monkeypatch.setattr(gpu, "launches_early", lambda device: True)
    stands = [Launched() for _ in kernels]
    for name, stand in zip(kernels, stands, strict=True):
        monkeypatch.setattr(module, name, stand)
    return stands
