"""What holds the processes of a replica together: one that fails ends the others, promptly and with its error.

Each follower keeps a connection to the leader. One that cannot go on says why before it ends; one that is killed
closes its connection. Either way the leader finds out which failure came first, tells the controller and the other
followers, and the process ends, whatever its main thread is stuck in.
"""

from cosmos_core.replica.lifeline.follower import FollowerLine
from cosmos_core.replica.lifeline.leader import LeaderLine
from cosmos_core.replica.lifeline.line import Lifeline, words_of

__all__ = ["FollowerLine", "LeaderLine", "Lifeline", "words_of"]
