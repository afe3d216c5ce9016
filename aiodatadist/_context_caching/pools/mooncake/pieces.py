"""Pieces of the registered arena, in the roles that the contract of pools gives them."""

from __future__ import annotations

from aiodatadist._context_caching.pools.arena import Piece


class MooncakeStage:
    """A piece of the arena to write to."""

    def __init__(self, piece: Piece) -> None:
        self.piece = piece
        self.address = piece.address
        self.nbytes = piece.nbytes

    def view(self) -> memoryview:
        return self.piece.view()

    def release(self) -> None:
        self.piece.release()


class MooncakeValue:
    """A piece of the arena with a value in it."""

    def __init__(self, piece: Piece) -> None:
        self._piece = piece
        self.address = piece.address
        self.nbytes = piece.nbytes

    def view(self) -> memoryview:
        return self._piece.view().toreadonly()

    def release(self) -> None:
        self._piece.release()
