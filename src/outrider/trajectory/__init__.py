"""From the recorded calls of one attempt to a tree over token ids, and from the tree to training samples.

    tree = build(calls)
    rows = tree.samples(rollout_id="r1", group_id="task-7", max_tokens=2048).samples

A **branch** is one sampled answer in its context: the prompt of a call followed by the ids of one of its choices. A
branch's parent is the longest other branch whose whole sequence its prompt starts with. Nothing else is consulted: no
message text, no order in time, no scan for special tokens. So interleaved agents, parallel calls, retries and edited
histories end up where their tokens say, and ids are never re-encoded (DESIGN.md, invariants 3 and 4).

    call 1   p p p A A                       root of the tree
    call 2   p p p A A u u B B               child of call 1: its prompt extends [p p p A A]
    call 3   p p p A A w C                   also a child of call 1: the history was edited after A
    call 4   q q D                           no branch is a prefix of [q q]: a second root, a *break* of continuity

A sample is the sequence of a leaf exactly as a policy saw it. Each sampled token is trained once: in the first sample,
in order of commit, that holds its branch.

Read in this order: `trie` (distinct tokens held once), `branch`, `tree` (`build`), `rows` (cutting under a budget),
`leave_out` (calls that are context only), `drift` (what broke continuity, and what that cost).
"""

from outrider.trajectory.branch import Answer, Branch
from outrider.trajectory.rows import SampleSet, TooLong
from outrider.trajectory.tree import Tree, build

__all__ = ["Answer", "Branch", "SampleSet", "TooLong", "Tree", "build"]
