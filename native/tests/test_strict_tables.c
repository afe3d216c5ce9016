/* Rank tables that HCCL refuses. [src hcomm topoinfo_ranktableConcise.cc, topoinfo_ranktableParser.cc; see hccl_strict_table.c] */
#include "strict_kit.h"

#define DEVICE(id, ip, rank) "{\"device_id\":\"" id "\",\"device_ip\":\"" ip "\",\"rank_id\":\"" rank "\"}"
#define TWO_DEVICES DEVICE("0", "10.0.0.1", "0") "," DEVICE("1", "10.0.0.2", "1")
#define SERVER(id, devices) "{\"server_id\":\"" id "\",\"device\":[" devices "]}"
#define TABLE(head, servers) "{" head "\"server_list\":[" servers "]}"
#define HEAD "\"version\":\"1.0\",\"status\":\"completed\","

static HcclResult try_table(const char *text)
{
    HcclCommConfig config = named_config("table");
    HcclComm comm = NULL;
    HcclResult code = HcclCommInitClusterInfoMemConfig(text, 0, &config, &comm);
    if (!code)
        CHECK_OK(HcclCommDestroy(comm));
    return code;
}

static HcclResult try_file(const char *text)
{
    char path[] = "/tmp/softnpu-table-XXXXXX";
    HcclComm comm = NULL;
    HcclCommConfig config = named_config("file");
    int fd = mkstemp(path);
    CHECK_EQ(write(fd, text, strlen(text)), strlen(text));
    close(fd);
    HcclResult code = HcclCommInitClusterInfoConfig(path, 0, &config, &comm);
    unlink(path);
    if (!code)
        CHECK_OK(HcclCommDestroy(comm));
    return code;
}

static void good(void)
{
    CHECK_OK(try_table(two_ranks));
    CHECK_OK(try_table(TABLE(HEAD, SERVER("a", DEVICE("0", "10.0.0.1", "0")))));                /* server_count is optional */
    CHECK_OK(try_table(TABLE(HEAD "\"server_count\":\"2\",", SERVER("a", DEVICE("0", "10.0.0.1", "0")) ","
                             SERVER("b", DEVICE("0", "10.0.0.2", "1")))));
    CHECK_OK(try_table("{\"version\":\"1.2\",\"status\":\"completed\",\"server_list\":[" SERVER("a", TWO_DEVICES) "],"
                       "\"super_pod_list\":[{\"super_pod_id\":\"0\",\"server_list\":[{\"server_id\":\"a\"}]}]}"));
    CHECK_OK(try_file(TABLE(HEAD, SERVER("a", DEVICE("0", "10.0.0.1", "0")))));
}

TEST(test_complete_tables_are_taken)
{
    run_alone("hccs", good);
    run_alone("roce", good);
}

static void incomplete(void)
{
    const char *const wrong[] = {
        TABLE("", SERVER("a", TWO_DEVICES)),
        TABLE("\"status\":\"completed\",", SERVER("a", TWO_DEVICES)),                               /* no version */
        TABLE("\"version\":\"2\",\"status\":\"completed\",", SERVER("a", TWO_DEVICES)),
        TABLE("\"version\":1.0,\"status\":\"completed\",", SERVER("a", TWO_DEVICES)),
        TABLE("\"version\":\"1.0\",", SERVER("a", TWO_DEVICES)),                                    /* no status */
        TABLE("\"version\":\"1.0\",\"status\":\"initializing\",", SERVER("a", TWO_DEVICES)),
        TABLE(HEAD "\"server_count\":\"7\",", SERVER("a", TWO_DEVICES)),
        TABLE(HEAD "\"server_count\":\"one\",", SERVER("a", TWO_DEVICES)),
        TABLE(HEAD, "{\"device\":[" TWO_DEVICES "]}"),                                              /* no server_id */
        TABLE(HEAD, SERVER("", TWO_DEVICES)),
        TABLE(HEAD, SERVER("a", TWO_DEVICES) "," SERVER("b", "")),                                  /* a server without a device */
        TABLE(HEAD, SERVER("a", DEVICE("0", "10.0.0.1", "0")) "," SERVER("a", DEVICE("1", "10.0.0.2", "1"))),
        TABLE(HEAD, SERVER("a", "{\"device_ip\":\"10.0.0.1\",\"rank_id\":\"0\"}")),                 /* no device_id */
        TABLE(HEAD, SERVER("a", DEVICE("", "10.0.0.1", "0"))),
        TABLE(HEAD, SERVER("a", DEVICE("npu0", "10.0.0.1", "0"))),
        TABLE(HEAD, SERVER("a", "{\"device_id\":0,\"device_ip\":\"10.0.0.1\",\"rank_id\":\"0\"}")),
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        CHECK_ERR(try_table(wrong[i]), HCCL_E_PARA);
        CHECK_ERR(try_file(wrong[i]), HCCL_E_PARA);         /* before any peer is awaited */
    }
}

TEST(test_a_table_has_version_status_server_ids_and_device_ids)
{
    run_alone("hccs", incomplete);
    run_alone("roce", incomplete);
}

/* [src ranktableParser.cc:526-537] Two processes on one NPU are two ranks with one address. */
static void same_ip(void)
{
    CHECK_ERR(try_table(TABLE(HEAD, SERVER("a", DEVICE("0", "10.0.0.1", "0") "," DEVICE("0", "10.0.0.1", "1")))), HCCL_E_PARA);
    CHECK_ERR(try_table(TABLE(HEAD, SERVER("a", DEVICE("0", "10.0.0.1", "0")) "," SERVER("b", DEVICE("0", "10.0.0.1", "1")))),
              HCCL_E_PARA);
}

TEST(test_a_device_ip_is_in_a_table_once)
{
    run_alone("hccs", same_ip);
    run_alone("roce", same_ip);
}

/* [src topoinfo_ranktableConcise.cc GetSingleDeviceIp] */
static void no_ip(void)
{
    bool hccs = !strcmp(getenv("SOFTNPU_STRICT"), "hccs");
    const char one[] = "{\"device_id\":\"0\",\"rank_id\":\"0\"}";
    char text[300];
    snprintf(text, sizeof text, TABLE(HEAD, SERVER("a", "%s")), one);
    CHECK_EQ(try_table(text), hccs ? HCCL_SUCCESS : HCCL_E_PARA);
    snprintf(text, sizeof text, TABLE(HEAD, SERVER("a", "%s") "," SERVER("b", DEVICE("0", "10.0.0.2", "1"))), one);
    CHECK_ERR(try_table(text), HCCL_E_PARA);
}

TEST(test_a_device_ip_may_be_left_out_within_one_server_without_roce)
{
    run_alone("hccs", no_ip);
    run_alone("roce", no_ip);
}

/* [src topoinfo_ranktableConcise.cc:180-189] */
static void other_device(void)
{
    CHECK_ERR(try_table(TABLE(HEAD, SERVER("a", DEVICE("3", "10.0.0.1", "0")))), HCCL_E_UNAVAIL);
    CHECK_ERR(try_file(TABLE(HEAD, SERVER("a", DEVICE("3", "10.0.0.1", "0")))), HCCL_E_UNAVAIL);
    CHECK_OK(try_table(TABLE(HEAD, SERVER("a", DEVICE("0", "10.0.0.1", "0") "," DEVICE("3", "10.0.0.2", "1")))));
}

TEST(test_a_rank_is_on_the_device_that_its_table_says)
{
    run_alone("hccs", other_device);
    run_alone("roce", other_device);
}

int main(void)
{
    RUN(test_complete_tables_are_taken);
    RUN(test_a_table_has_version_status_server_ids_and_device_ids);
    RUN(test_a_device_ip_is_in_a_table_once);
    RUN(test_a_device_ip_may_be_left_out_within_one_server_without_roce);
    RUN(test_a_rank_is_on_the_device_that_its_table_says);
    return check_done();
}
