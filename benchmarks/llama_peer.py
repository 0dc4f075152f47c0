"""Serves a GGUF file through llama.cpp for benchmarks.laptop, in an environment that has `xllamacpp`.

    python benchmarks/llama_peer.py FILE.gguf THREADS STREAMS CONTEXT_TOKENS

Prints the address of its HTTP server when the model is loaded, and ends with its standard input. It imports
nothing of this repository, so that the environment needs nothing else.
"""

import sys

import xllamacpp


def main() -> None:
    """Serve until standard input ends."""
    path, *numbers = sys.argv[1:]
    threads, streams, context_tokens = (int(number) for number in numbers)
    settings = xllamacpp.CommonParams()
    settings.model.path = path
    settings.n_ctx = context_tokens
    settings.n_parallel = streams
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = threads
    settings.n_gpu_layers = 0
    server = xllamacpp.Server(settings)
    print(server.listening_address, flush=True)
    print(xllamacpp.get_system_info(), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
