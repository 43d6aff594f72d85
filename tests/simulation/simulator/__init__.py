"""Whole runs in one process, on simulated time, by a seed: what the controller is proven by.

The controller's server loop and state machine and the replicas' sessions are the real ones. Sockets, disk, clock,
processes, training and generation are made up, and go wrong as `faults` says; `witness` lists the oracles that must
hold.

    python -m tests.simulation.simulator --seed 17 --trace
    python -m tests.simulation.simulator --seeds 0:500
    python -m tests.simulation.simulator --seed 17 --faults loss=0.2,controller_crash=0.5,until_s=30
"""

from tests.simulation.simulator.faults import Faults
from tests.simulation.simulator.scenario import Scenario
from tests.simulation.simulator.simulation import Simulation
from tests.simulation.simulator.witness import Violation

__all__ = ["Faults", "Scenario", "Simulation", "Violation"]
