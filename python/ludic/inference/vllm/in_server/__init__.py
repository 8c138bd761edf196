"""What runs inside a vLLM server's own process, whose environment has none of ludic's dependencies.

Nothing here imports anything of ludic but this package. What both processes need, such as the names
of headers, is defined here and imported from here.
"""
