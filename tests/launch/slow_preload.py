"""A preloaded module that takes its time, as torch does."""

import time

time.sleep(60)
