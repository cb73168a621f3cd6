"""What tracing costs: in the loops of the coordinator and of a service, and in the thread that makes spans."""
