"""What torchtitan lacks on a machine without an accelerator, in one room. Nothing here acts where there is one."""
