from tests.worlds import run_world


def test_megatron_core_loads_what_is_converted_and_what_it_saves_converts_back(tmp_path):
    output = run_world("tests/distributed/convert_worker.py", 4, tmp_path)
    assert output.count("agrees on") == 12
