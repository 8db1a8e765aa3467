"""What `bench.cores` takes stacks for."""

import pytest

pytest.importorskip("torch", reason="needs torch")

from bench.cores import parts

STACKS = """
 7f01 f32_sum
 7f02 fold_run

 8101 copy_user_enhanced_fast_string
 8102 tcp_recvmsg_locked
 8103 tcp_recvmsg
 7f03 recv

 8104 tcp_v4_rcv
 8105 net_rx_action
 8106 tcp_write_xmit
 8107 tcp_sendmsg
 7f04 sendmsg

 8108 skb_copy_from_iter
 8109 tcp_sendmsg
 7f04 sendmsg

 810a do_epoll_wait
 7f05 epoll_wait

 7f06 map_get
 7f07 checksum

 7f08 block8_e4m3_mean

 7f09 u8_max_leaves
"""


def test_a_stack_is_of_what_it_is_for(tmp_path):
    (tmp_path / "stacks").write_text(STACKS)
    found = parts(tmp_path / "stacks")
    assert found == {
        "sum": 3 / 8, "packets": 1 / 8, "in": 1 / 8, "out": 1 / 8, "wait": 1 / 8, "rest": 1 / 8
    }  # fmt: skip
