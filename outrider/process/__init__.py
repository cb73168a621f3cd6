"""The life of a process: hosting, drain, health over HTTP, processor affinity, discovery of replicas."""
