"""The router: the OpenAI API to clients, one gRPC stream to each worker."""
