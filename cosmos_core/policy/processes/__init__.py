"""The processes of a replica, and the replicas of a group: how they find one another, and what they say."""
