"""Whole runs in one process, on simulated time, by a seed: what the controller is proven by.

The controller's server loop and state machine and the replicas' sessions are the real ones. Sockets, disk, clock,
processes, training and generation are made up, and go wrong as `faults` says; `witness` lists the oracles that must
hold.

    python -m cosmos_core.testing.simulation --seed 17 --trace
    python -m cosmos_core.testing.simulation --seeds 0:500
    python -m cosmos_core.testing.simulation --seed 17 --faults loss=0.2,controller_crash=0.5,until_s=30
"""

from cosmos_core.testing.simulation.faults import Faults
from cosmos_core.testing.simulation.scenario import Scenario
from cosmos_core.testing.simulation.simulation import Simulation
from cosmos_core.testing.simulation.witness import Violation

__all__ = ["Faults", "Scenario", "Simulation", "Violation"]
