"""Workers beyond this process: Ray starts, places and replaces them, on this machine or a cluster
(``pip install "sinklab[ray]"``).
"""

PROVIDES = {"engines": "engine"}
