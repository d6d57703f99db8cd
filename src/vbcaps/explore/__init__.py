"""The explorer: a page in the browser that shows how a capsule network routes an image (``vbcaps explore``).

``server.py`` answers requests, ``answers.py`` computes what the page shows, ``networks.py`` knows the networks and
their images, ``pictures.py`` reads, changes and writes pixels, and ``static/`` is the page. The server keeps nothing of
a page: each request holds all that its answer depends on.
"""
