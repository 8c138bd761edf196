"""`python -m ludic.inference.vllm_server FLAGS...` is `python -m ludic.inference.vllm.server FLAGS...`."""

from ludic.inference.vllm.server import main

if __name__ == "__main__":
    main()
