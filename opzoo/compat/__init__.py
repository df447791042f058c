"""Other projects' names over opzoo's operators: ``opzoo.compat.mmcv``, ``.mmdet`` and ``.torchvision``.

Nothing here is imported by ``import opzoo``; each module asks for the project it serves, and for
nothing else.
"""
