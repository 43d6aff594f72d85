"""Turns off the look for garbage in the process that imports it: nothing that imports make is any."""

import gc

gc.disable()
