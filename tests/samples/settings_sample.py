"""Settings are kept as they were given, and refused where a cluster is to have them; links that fail are statuses."""

from llm_datadist import LLMClusterInfo, LLMConfig, LLMDataDist, LLMException, LLMRole, LLMStatusCode
from llm_datadist.v2.llm_datadist import _shutdown_handler
from sample_common import CLIENT, IS_SERVER, PORT, SERVER, initialise, link, peer, status_of, unlink

REFUSED = [
    {"device_id": [0, 1]},
    {"device_id": (0, 1)},
    {"ge_options": {"ge.flowGraphMemMaxSize": "1,2"}},
    {"global_resource_config": ""},
    {"global_resource_config": "{"},
    {"transfer_backend": "hixl", "enable_cache_manager": False, "listen_ip_info": "127.0.0.1:0"},
]


def options_of(**settings):
    config = LLMConfig()
    config.device_id = 0
    config.enable_cache_manager = True
    for name, value in settings.items():
        setattr(config, name, value)
    return config.generate_options()


assert options_of(device_id=[0, 1])["ge.exec.deviceId"] == "0;1"
assert options_of(device_id=[0, 1])["ge.session_device_id"] == "0"
assert options_of(ge_options={"ge.any": "1", "llm.any": "2"}).items() >= {("ge.any", "1"), ("llm.any", "2")}
for settings in REFUSED:
    options = options_of(**settings)
    assert status_of(LLMDataDist(LLMRole.DECODER, 7).init, options) == LLMStatusCode.LLM_PARAM_INVALID, settings
try:
    LLMConfig().ge_options = {"ge.flowGraphMemMaxSize": 5}
except TypeError:
    pass
else:
    raise AssertionError("an option is text")

if IS_SERVER:
    datadist = initialise()
    itself = peer(SERVER, PORT)
    link(datadist, itself)
    unlink(datadist, itself)
else:
    datadist = initialise(enable_remote_cache_accessible=True)
    nowhere = LLMClusterInfo()
    nowhere.remote_cluster_id = SERVER
    nowhere.append_local_ip_info("127.0.0.1", 0)
    invalid = LLMStatusCode.LLM_PARAM_INVALID
    assert datadist.link_clusters([nowhere], 1000) == (invalid, [invalid])
    assert datadist.unlink_clusters([nowhere], 1000) == (invalid, [invalid])
    assert datadist.unlink_clusters([nowhere], 1000, True) == (LLMStatusCode.LLM_SUCCESS, [LLMStatusCode.LLM_SUCCESS])
_shutdown_handler()
try:
    datadist.check_link_status(CLIENT)
except LLMException:
    raise
except RuntimeError:
    pass
else:
    raise AssertionError("it is finalized")
