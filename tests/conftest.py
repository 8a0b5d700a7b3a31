"""For all tests: what the developer who runs them has set for their own work decides nothing."""

import os

os.environ["EUROPA_USER_CONFIG"] = ""
