"""The code that runs inside a vLLM server's own process.

It imports nothing else of ludic, because the server's environment has none of ludic's dependencies.
What both processes need, such as the names of headers, is defined here and imported from here.
"""
