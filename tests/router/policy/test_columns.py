"""The columns of a fleet, and what is known of them without looking at each row."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from quire.router.policy.columns import NUM_COLUMNS, NUM_PLACES, SEEN_S, ReplicaColumns

ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["add", "remove", "write", "ask"]),
        st.integers(0, 100),
        st.sampled_from([-math.inf, 0.0, 1.0, 2.0, 3.0, math.inf]),
    ),
    max_size=60,
)


@given(ACTIONS, st.sampled_from([SEEN_S, NUM_PLACES]))
def test_whether_some_are_below_a_bound_is_known(actions, column):
    table, rows, num_added = ReplicaColumns(), {}, 0

    def write(name, value):
        values = [7.0] * NUM_COLUMNS
        values[column] = rows[name] = value
        table.write(table.names.index(name), tuple(values))

    for action, which, value in actions:
        if action == "add":
            num_added += 1
            table.add(f"r{num_added}")
            write(f"r{num_added}", value)
        elif action == "ask":
            assert table.some_below(column, value) == any(x < value for x in rows.values())
        elif rows:
            name = sorted(rows)[which % len(rows)]
            if action == "write":
                write(name, value)
            else:
                del rows[name]
                moved = table.remove(table.names.index(name))
                if moved is not None:
                    write(moved, rows[moved])
