"""From a frozen configuration to a torchtitan run. Importing this package loads torch and torchtitan (seconds)."""

from europa_exp.cpu import device as _device

# torchtitan binds the device when its modules are imported, so this comes before every other import of the package.
_device.enable()

from europa_exp.training.run import train  # noqa: E402

__all__ = ["train"]
