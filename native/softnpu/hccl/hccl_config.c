/* What the caller and the environment decide: the configuration structure, time limits, sizes of data types. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "hccl_soft.h"

#define CONNECT_SECONDS 120                             /* the vendor's default */
#define EXEC_SECONDS    1836                            /* likewise */

/* The first 24 bytes, which the vendor's structure hides in `reserved`. */
typedef struct config_head { uint64_t size; uint32_t magic, version; uint64_t zero; } config_head;

HcclResult hccl_config_name(const char *function, const HcclCommConfig *config, char name[HCCL_NAME_BYTES])
{
    config_head head;
    name[0] = 0;
    memcpy(&head, config->reserved, sizeof head);
    if (head.magic != HCCL_COMM_CONFIG_MAGIC_WORD)
        return soft_hccl_error(HCCL_E_PARA, "%s: HcclCommConfig has magic 0x%x instead of 0x%x", function, head.magic,
                               HCCL_COMM_CONFIG_MAGIC_WORD);
    if (head.size < sizeof head || head.version < 1)
        return soft_hccl_error(HCCL_E_PARA, "%s: HcclCommConfig says size %llu, version %u", function,
                               (unsigned long long)head.size, head.version);
    if (head.size < offsetof(HcclCommConfig, hcclCommName) + HCCL_NAME_BYTES)
        return HCCL_SUCCESS;                            /* older and shorter */
    if (strnlen(config->hcclCommName, HCCL_NAME_BYTES) == HCCL_NAME_BYTES)
        return soft_hccl_error(HCCL_E_PARA, "%s: hcclCommName is longer than %d characters", function, HCCL_NAME_BYTES - 1);
    memcpy(name, config->hcclCommName, HCCL_NAME_BYTES);
    return HCCL_SUCCESS;
}

/* hcclUdi is free text to the vendor. Here it may carry what the vendor has no call for: a way to end an initialisation
 * or an HcclCommPrepare that waits for peers. "softnpu-cancel-fd=N": it ends with E_NOT_FOUND once that eventfd is
 * readable. The caller keeps it open until the initialisation is over; of a one-sided communicator, until it is prepared
 * or destroyed.                                                                                                       */
int hccl_config_cancel(const HcclCommConfig *config)
{
    static const char prefix[] = "softnpu-cancel-fd=";
    config_head head;
    int fd;
    char end;
    memcpy(&head, config->reserved, sizeof head);
    if (head.size < offsetof(HcclCommConfig, hcclUdi) + sizeof config->hcclUdi ||
        strnlen(config->hcclUdi, sizeof config->hcclUdi) == sizeof config->hcclUdi)
        return -1;
    if (strncmp(config->hcclUdi, prefix, sizeof prefix - 1))
        return -1;
    return sscanf(config->hcclUdi + sizeof prefix - 1, "%9d%c", &fd, &end) == 1 && fd >= 0 ? fd : -1;
}

/* The vendor rejects less than 120 s; here a short limit is what tests want. */
static bool seconds_from_environment(const char *variable, int fallback, int *seconds)
{
    const char *text = getenv(variable);
    char *end;
    *seconds = fallback;
    if (!text || !*text)
        return true;
    errno = 0;
    long value = strtol(text, &end, 10);
    if (errno || *end || value < 1 || value > 1000000)
        return false;
    *seconds = (int)value;
    return true;
}

HcclResult hccl_connect_deadline(const char *function, int seconds, int64_t *deadline)
{
    if (seconds < -1)
        return soft_hccl_error(HCCL_E_PARA, "%s: timeout %d; -1 means forever", function, seconds);
    if (seconds == 0 && !seconds_from_environment("HCCL_CONNECT_TIMEOUT", CONNECT_SECONDS, &seconds))
        return soft_hccl_error(HCCL_E_PARA, "%s: HCCL_CONNECT_TIMEOUT=%s is not a number of seconds", function,
                               getenv("HCCL_CONNECT_TIMEOUT"));
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
