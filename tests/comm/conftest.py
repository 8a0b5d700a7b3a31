"""torchtitan binds the device when it is imported, so the device is chosen before any test module imports it."""

from europa_exp.cpu import device

device.enable()
