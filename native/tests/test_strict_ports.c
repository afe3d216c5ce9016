/* Two processes on one NPU: each listens on a port of the device's own. [src EI0020: "Failed to enable listening for the NPU network
 * adapter socket"; hcomm adapter_hccp.cc] Ports here are of this run of the tests, so that runs beside it do not meet. */
#include "strict_kit.h"

static unsigned base_port(void)
{
    return 20000 + (unsigned)getppid() % 20000 * 2;
}

static HcclResult init(unsigned port, const char *name, HcclComm *comm)
{
    char text[400];
    HcclCommConfig config = named_config(name);
    snprintf(text, sizeof text, "{\"version\":\"1.0\",\"status\":\"completed\",\"server_list\":[{\"server_id\":\"a\",\"device\":["
             "{\"device_id\":\"0\",\"device_ip\":\"10.0.0.1\",\"device_port\":\"%u\",\"rank_id\":\"0\"}]}]}", port);
    return HcclCommInitClusterInfoMemConfig(text, 0, &config, comm);
}

static void on_device_0(void)
{
    CHECK_OK(aclrtSetDevice(0));
}

static void two_processes(uint32_t rank, int other)
{
    HcclComm first, second;
    unsetenv("HCCL_NPU_SOCKET_PORT_RANGE");
    on_device_0();
    if (rank == 0) {
        CHECK_OK(init(base_port(), "first", &first));
        CHECK_OK(init(base_port(), "second", &second));     /* one process listens once */
        CHECK_OK(HcclCommDestroy(second));
    }
    in_step(other);
    if (rank == 1) {
        CHECK_ERR(init(base_port(), "first", &first), HCCL_E_UNAVAIL);
        CHECK_OK(init(base_port() + 1, "first", &first));
        CHECK_OK(HcclCommDestroy(first));
        setenv("HCCL_NPU_SOCKET_PORT_RANGE", "61000-61050", 1);
        CHECK_OK(init(base_port(), "first", &first));
        CHECK_OK(HcclCommDestroy(first));
        unsetenv("HCCL_NPU_SOCKET_PORT_RANGE");
    }
    in_step(other);
    if (rank == 0)
        CHECK_OK(HcclCommDestroy(first));
    in_step(other);
    if (rank == 1) {                                        /* the port is free again */
        CHECK_OK(init(base_port(), "first", &first));
        CHECK_OK(HcclCommDestroy(first));
    }
    CHECK_OK(aclrtResetDevice(0));
    if (rank == 1)
        CHECK_OK(aclrtSetDevice(1));
}

TEST(test_two_processes_on_one_device_listen_on_two_ports_over_hccs)
{
    run_strict("hccs", two_processes);
}

TEST(test_two_processes_on_one_device_listen_on_two_ports_over_roce)
{
    run_strict("roce", two_processes);
}

int main(void)
{
    RUN(test_two_processes_on_one_device_listen_on_two_ports_over_hccs);
    RUN(test_two_processes_on_one_device_listen_on_two_ports_over_roce);
    return check_done();
}
