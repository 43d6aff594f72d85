"""Runs on a Kubernetes cluster: a JobSet, whose controller gives orders to the pods of its replicas."""
