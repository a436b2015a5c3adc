"""The live backend: real load on a real vLLM server, through a gate with one cap per tenant."""
