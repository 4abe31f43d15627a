"""The replicas' columns, and the bounds that save scans of them."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from quire.router.policy.fleet_view import FleetView
from quire.router.policy.replica_columns import COLUMN, NUM_COLUMNS, PerColumn, ReplicaColumns

ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["add", "remove", "write", "ask"]),
        st.integers(0, 100),
        st.sampled_from([-math.inf, 0.0, 1.0, 2.0, 3.0, math.inf]),
    ),
    max_size=60,
)


@given(ACTIONS, st.sampled_from([COLUMN.seen_s, COLUMN.num_places]))
def test_some_below_equals_a_scan(actions, column):
    table, rows, num_added = ReplicaColumns(), {}, 0

    def write(name, value):
        values = [7.0] * NUM_COLUMNS
        values[column] = rows[name] = value
        table.write(table.names.index(name), PerColumn(*values))

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


def test_each_value_of_a_row_is_in_the_column_of_its_name():
    table = ReplicaColumns()
    row = PerColumn(*(float(100 + i) for i in range(NUM_COLUMNS)))
    table.write(table.add("r"), row)
    fleet = FleetView(table.names, table.columns, *np.zeros((3, 1)), now_s=1000.0)
    values = fleet.named() | {"seen_s": table.matrix[COLUMN.seen_s]}
    for name, value in row._asdict().items():
        if name in ("report_s", "head_s"):
            assert values[name.replace("_s", "_age_s")] == 1000.0 - value
        else:
            assert values["reported_work" if name == "queued_tokens" else name] == value
