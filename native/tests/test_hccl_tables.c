/* Rank tables: what is accepted, and what is refused with a message. */
#include "hccl_pair.h"

#define DEVICE(rank) "{\"device_id\":\"0\",\"device_ip\":\"1.2.3.4\",\"rank_id\":\"" rank "\"}"
#define TABLE(devices) "{\"server_list\":[{\"server_id\":\"a\",\"device\":[" devices "]}]}"

static HcclResult try_table(const char *text, uint32_t rank)
{
    HcclCommConfig config = named_config("table");
    HcclComm comm = NULL;
    HcclResult code = HcclCommInitClusterInfoMemConfig(text, rank, &config, &comm);
    if (!code)
        CHECK_OK(HcclCommDestroy(comm));
    return code;
}

TEST(test_good_tables)
{
    CHECK_OK(try_table(two_ranks, 0));
    CHECK_OK(try_table(two_ranks, 1));
    CHECK_OK(try_table(TABLE(DEVICE("0")), 0));
    CHECK_OK(try_table(TABLE(DEVICE("1") "," DEVICE("0")), 1));
    CHECK_OK(try_table("{\"server_list\":[{\"device\":[" DEVICE("0") "]},{\"device\":[" DEVICE("1") "]}]}", 1));
    CHECK_OK(try_table(" \r\n\t{ \"super_pod_list\" : [ { \"x\" : [ true , false , null , -0.5e+3 , 0 , \"\\u00e4\\n\" , { } , [ ] ] } ] ,"
                       " \"server_list\" : [ { \"device\" : [ { \"rank_id\" : \"0\" } ] } ] } \n", 0));
}

TEST(test_tables_without_their_ranks)
{
    CHECK_ERR(try_table(two_ranks, 2), HCCL_E_PARA);
    CHECK_ERR(try_table(two_ranks, UINT32_MAX), HCCL_E_PARA);
    const char *wrong[] = {
        "{}", TABLE(""), "{\"server_list\":[]}", "{\"server_list\":{}}", "{\"server_list\":\"\"}", "{\"server_list\":[[]]}",
        TABLE("{}"), TABLE("[]"), TABLE("{\"rank_id\":0}"), TABLE(DEVICE("")), TABLE(DEVICE("zero")), TABLE(DEVICE("-1")),
            TABLE(DEVICE("64")),
        TABLE(DEVICE("99999999999999999999")), TABLE(DEVICE("1")), TABLE(DEVICE("0") "," DEVICE("0")),
            TABLE(DEVICE("0") "," DEVICE("2")),
        TABLE("{\"rank_id\":\"0\",\"rank_id\":\"1\"}"),
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        CHECK_ERR(try_table(wrong[i], 0), HCCL_E_PARA);
}

TEST(test_text_that_is_not_json)
{
    const char *wrong[] = {
        "", " ", "null", "[]", "\"\"", "1", "x", "{", "}", "{]", "{\"a\"}", "{\"a\":}", "{\"a\":1,}", "{\"a\":1 \"b\":2}",
            "{a:1}", "{'a':1}",
        "{\"a\":01}", "{\"a\":.5}", "{\"a\":1.}", "{\"a\":1e}", "{\"a\":-}", "{\"a\":+1}", "{\"a\":tru}", "{\"a\":nulll}",
            "{\"a\":\"\\x\"}",
        "{\"a\":\"\\u12g4\"}", "{\"a\":\"\\u12", "{\"a\":\"\\", "{\"a\":\"tab\there\"}", "{\"a\":[1,]}", "{\"a\":[1 2]}",
            "{\"a\":[1}",
        TABLE(DEVICE("0")) ",", TABLE(DEVICE("0")) "{}", "\xef\xbb\xbf" TABLE(DEVICE("0")),
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        CHECK_ERR(try_table(wrong[i], 0), HCCL_E_PARA);
}

TEST(test_every_beginning_of_a_table_is_refused)
{
    char text[sizeof two_ranks];
    for (size_t length = 0; length < sizeof two_ranks - 1; length++) {
        memcpy(text, two_ranks, length);
        text[length] = 0;
        CHECK_EQ(try_table(text, 0), HCCL_E_PARA);
    }
}

/* Any change of one byte gives a table or an error, never more. */
TEST(test_every_changed_byte_is_survived)
{
    static const char changes[] = "\"\\{}[]:,09-et\x01\xff ";
    char text[sizeof two_ranks];
    for (size_t at = 0; at < sizeof two_ranks - 1; at++)
        for (const char *change = changes; *change; change++) {
            memcpy(text, two_ranks, sizeof text);
            text[at] = *change;
            HcclResult code = try_table(text, 0);
            CHECK(code == HCCL_SUCCESS || code == HCCL_E_PARA);
        }
}

TEST(test_deep_and_long_tables)
{
    size_t size = (1 << 20) + 10;
    char *text = malloc(size);
    memset(text, '[', size - 1);
    memcpy(text, "{\"a\":", 5);
    text[size - 1] = 0;
    CHECK_ERR(try_table(text, 0), HCCL_E_PARA);
    text[100000] = 0;
    CHECK_ERR(try_table(text, 0), HCCL_E_PARA);
    free(text);
}

int main(void)
{
    open_device(0);
    RUN(test_good_tables);
    RUN(test_tables_without_their_ranks);
    RUN(test_text_that_is_not_json);
    RUN(test_every_beginning_of_a_table_is_refused);
    RUN(test_every_changed_byte_is_survived);
    RUN(test_deep_and_long_tables);
    close_device(0);
    return check_done();
}
