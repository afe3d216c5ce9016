/* Settings from the caller and the environment: the configuration structure, time limits, sizes of data types. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "hccl_soft.h"
#include "runtime.h"

#define CONNECT_SECONDS 120                             /* the vendor's default */
#define EXEC_SECONDS    1836                            /* likewise */

/* Fields of the version-5 configuration that are understood: buffer size, deterministic, name, udi, expansion mode, traffic
 * class, service level. The name and the last two are checked; the others concern hardware, and may have any value here.    */
#define CAPABILITY 7

/* The first 24 bytes, which the vendor's structure hides in `reserved`. */
typedef struct config_head { uint64_t size; uint32_t magic, version; uint64_t zero; } config_head;

uint32_t HcclGetCommConfigCapability(void)
{
    return soft_fault(__func__, NULL) ? 0 : CAPABILITY;
}

static HcclResult read_name(const char *function, const config_head *head, const HcclCommConfig *given, char *name)
{
    if (head->size < offsetof(HcclCommConfig, hcclCommName) + HCCL_NAME_BYTES)
        return HCCL_SUCCESS;                            /* older and shorter */
    if (strnlen(given->hcclCommName, HCCL_NAME_BYTES) == HCCL_NAME_BYTES)
        return soft_hccl_error(HCCL_E_PARA, "%s: hcclCommName is longer than %d characters", function, HCCL_NAME_BYTES - 1);
    memcpy(name, given->hcclCommName, HCCL_NAME_BYTES);
    return HCCL_SUCCESS;
}

static bool number_from_environment(const char *variable, long low, long high, long *value)
{
    const char *text = getenv(variable);
    char *end;
    if (!text || !*text)
        return true;
    errno = 0;
    *value = strtol(text, &end, 10);
    return !errno && !*end && *value >= low && *value <= high;
}

/* ---- RDMA: what the configuration says, else the environment, else the vendor ---- */

typedef struct rdma_rule { const char *name, *variable; long fallback, high, step; } rdma_rule;

static const rdma_rule traffic_class = {"hcclRdmaTrafficClass", "HCCL_RDMA_TC", 132, 255, 4};
static const rdma_rule service_level = {"hcclRdmaServiceLevel", "HCCL_RDMA_SL", 4, 7, 1};

static HcclResult rdma_from_environment(const char *function, const rdma_rule *rule, uint32_t *value)
{
    long number = rule->fallback;
    if (!number_from_environment(rule->variable, 0, rule->high, &number) || number % rule->step)
        return soft_hccl_error(HCCL_E_PARA, "%s: %s=%s: must be in [0, %ld] and a multiple of %ld", function,
                               rule->variable, getenv(rule->variable), rule->high, rule->step);
    *value = (uint32_t)number;
    return HCCL_SUCCESS;
}

static HcclResult read_rdma(const char *function, const rdma_rule *rule, uint32_t given, uint32_t *value)
{
    if (given == UINT32_MAX)                            /* HCCL_COMM_..._CONFIG_NOT_SET, of both */
        return rdma_from_environment(function, rule, value);
    if (given > rule->high || given % rule->step)
        return soft_hccl_error(HCCL_E_PARA, "%s: %s is %u: must be in [0, %ld] and a multiple of %ld", function,
                               rule->name, given, rule->high, rule->step);
    *value = given;
    return HCCL_SUCCESS;
}

/* ---- time limits: the environment's ---- */

/* HCCL refuses a time limit for connections of less than 120 s, and every communicator with it; here tests may want a short one,
 * in the same variable or, with SOFTNPU_STRICT, in one of softnpu's own. [doc HCCL_CONNECT_TIMEOUT: 120 to 7200] */
static bool connect_limit(long *seconds)
{
    bool strict = soft_is_strict();
    *seconds = CONNECT_SECONDS;
    if (!number_from_environment("HCCL_CONNECT_TIMEOUT", strict ? 120 : 1, strict ? 7200 : 1000000, seconds))
        return false;
    return number_from_environment("SOFTNPU_CONNECT_TIMEOUT", 1, 7200, seconds);
}

static HcclResult check_connect_limit(const char *function, int *seconds)
{
    long limit;
    if (!connect_limit(&limit))
        return soft_hccl_error(HCCL_E_PARA, "%s: HCCL_CONNECT_TIMEOUT=%s is not a number of seconds%s", function,
                               getenv("HCCL_CONNECT_TIMEOUT"), soft_is_strict() ? " from 120 to 7200" : "");
    *seconds = (int)limit;
    return HCCL_SUCCESS;
}

/* ---- where batches are unfolded: what the configuration says, else the environment, else the vendor ----
 *
 * On an A3 only HOST keeps it on the host, on an A2 only AI_CPU moves it to the device. [src externalinput.cc:1706-1732,
 * comm_config.cc:352-357] */

enum { EXPANSION_DEFAULT, EXPANSION_HOST, EXPANSION_AI_CPU };   /* AIV is 3 */

static uint32_t mode_from_environment(void)
{
    const char *variable = getenv("HCCL_OP_EXPANSION_MODE");
    if (variable && !strcmp(variable, "HOST"))
        return EXPANSION_HOST;
    return variable && !strcmp(variable, "AI_CPU") ? EXPANSION_AI_CPU : EXPANSION_DEFAULT;
}

static bool unfolds(const config_head *head, const HcclCommConfig *given)
{
    bool is_read = head->version >= 5 && head->size >= offsetof(HcclCommConfig, hcclOpExpansionMode) + sizeof(uint32_t)
        && HcclGetCommConfigCapability() > HCCL_COMM_CONFIG_OP_EXPANSION_MODE;
    uint32_t mode = is_read ? given->hcclOpExpansionMode : EXPANSION_DEFAULT;
    if (mode == EXPANSION_DEFAULT)
        mode = mode_from_environment();
    if (soft_setting.strict == SOFT_STRICT_HCCS)
        return mode == EXPANSION_AI_CPU;
    return soft_setting.strict == SOFT_STRICT_AICPU && mode != EXPANSION_HOST;
}

/* ---- the whole ---- */

static HcclResult read_head(const char *function, const HcclCommConfig *given, config_head *head)
{
    memcpy(head, given->reserved, sizeof *head);
    if (head->magic != HCCL_COMM_CONFIG_MAGIC_WORD)
        return soft_hccl_error(HCCL_E_PARA, "%s: HcclCommConfig has magic 0x%x instead of 0x%x", function, head->magic,
                               HCCL_COMM_CONFIG_MAGIC_WORD);
    if (head->size < sizeof *head || head->version < 1)
        return soft_hccl_error(HCCL_E_PARA, "%s: HcclCommConfig says size %llu, version %u", function,
                               (unsigned long long)head->size, head->version);
    return HCCL_SUCCESS;
}

HcclResult hccl_config_read(const char *function, const HcclCommConfig *given, hccl_config *config)
{
    config_head head = {0};
    *config = (hccl_config){0};
    HcclResult code = given ? read_head(function, given, &head) : HCCL_SUCCESS;
    bool has_rdma = head.version >= 5 && head.size >= offsetof(HcclCommConfig, hcclRdmaServiceLevel) + sizeof(uint32_t);
    if (!code)
        code = read_name(function, &head, given, config->name);
    if (!code)
        code = read_rdma(function, &traffic_class, has_rdma ? given->hcclRdmaTrafficClass : UINT32_MAX, &config->traffic_class);
    if (!code)
        code = read_rdma(function, &service_level, has_rdma ? given->hcclRdmaServiceLevel : UINT32_MAX, &config->service_level);
    config->unfolds = !code && unfolds(&head, given);
    int seconds;
    if (!code && soft_is_strict())
        code = check_connect_limit(function, &seconds);
    return code;
}

static bool seconds_from_environment(const char *variable, int fallback, int *seconds)
{
    long value = fallback;
    bool ok = number_from_environment(variable, 1, 1000000, &value);
    *seconds = ok ? (int)value : fallback;
    return ok;
}

HcclResult hccl_connect_deadline(const char *function, int seconds, int64_t *deadline)
{
    if (seconds < -1)
        return soft_hccl_error(HCCL_E_PARA, "%s: timeout %d: must be at least 0 seconds, or -1 for no limit", function, seconds);
    HcclResult code = seconds ? HCCL_SUCCESS : check_connect_limit(function, &seconds);
    if (code)
        return code;
    *deadline = seconds < 0 ? INT64_MAX : soft_now_ns() + seconds * (int64_t)1000000000;
    return HCCL_SUCCESS;
}

int64_t hccl_exec_deadline(void)
{
    int seconds;
    if (!seconds_from_environment("HCCL_EXEC_TIMEOUT", EXEC_SECONDS, &seconds))
        seconds = EXEC_SECONDS;
    return soft_now_ns() + seconds * (int64_t)1000000000;
}

bool hccl_bytes(uint64_t count, HcclDataType type, uint64_t *bytes)
{
    static const uint8_t sizes[] = {1, 2, 4, 2, 4, 8, 8, 1, 2, 4, 8, 2, 16, 0, 1, 1, 1, 1};   /* 14..17: 8-bit floats */
    if ((unsigned)type >= sizeof sizes || !sizes[type])
        return false;
    return !__builtin_mul_overflow(count, sizes[type], bytes);
}
