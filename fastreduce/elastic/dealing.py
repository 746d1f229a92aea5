"""Who has which samples of an endless stream of epochs, while processes come and go: numbers alone, and no group."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class Deal:
    """The numbers 0, 1, 2, …, of which each is in one hand, left, or done.

    All who train make the same moves, in the same order, and so have the same hands after each. What a lost process had
    in its hand is left again. The lowest of what is left is dealt first.

    Args:
        size: how many numbers a member takes a step.
        steps: for how many steps to come a member has them in its hand.

    Attributes:
        hands: of each member, those of the next step first.
        back: what was dealt once and is left again, in order; all below `top`.
        top: all from here on are left, too.
    """

    def __init__(self, size: int, steps: int) -> None:
        self.size, self.steps = size, steps
        self.hands: dict[int, list[int]] = {}
        self.back: list[int] = []
        self.top = 0
        self._brought: dict[int, list[int]] = {}

    @property
    def lowest(self) -> int:
        """All numbers below it are done."""
        return min([self.top, *self.back[:1], *(min(hand) for hand in self.hands.values() if hand)])

    def share(self, members: Sequence[int]) -> None:
        """These train now: take back what others have, and deal out what these are short of."""
        self.take_back([member for member in self.hands if member not in members])
        for step in range(1, self.steps + 1):
            for member in members:
                hand = self.hands.setdefault(member, [])
                hand += self._take(step * self.size - len(hand))

    def take_back(self, members: Iterable[int]) -> None:
        """What these have is left again."""
        self.back = sorted([*self.back, *(number for member in members for number in self.hands.pop(member))])

    def bring(self, members: Sequence[int]) -> None:
        """The averages under way are of what these have for this step."""
        self._brought = {member: self.hands[member][: self.size] for member in members}

    def count(self) -> None:
        """The averages count: what was brought for them is done, also that of members that are gone by now."""
        done: set[int] = set()
        for member, numbers in self._brought.items():
            hand = self.hands.get(member, [])
            if hand[: self.size] == numbers:
                del hand[: self.size]
            else:
                done.update(numbers)  # they have been taken back
        if done:
            self.back = [number for number in self.back if number not in done]
        self.share([*self._brought])

    def _take(self, count: int) -> list[int]:
        """Take so many of what is left; none for a count below 1."""
        count = max(0, count)
        taken = self.back[:count]
        del self.back[:count]
        begin, self.top = self.top, self.top + count - len(taken)
        return [*taken, *range(begin, self.top)]
