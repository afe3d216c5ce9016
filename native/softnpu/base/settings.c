/* settings.c: reads the imitated machine's properties from the environment. */
#include "runtime.h"
#include <errno.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

soft_settings soft_setting = { .device_memory = 64ull << 30 };

static aclError read_number(const char *name, uint64_t least, uint64_t most, uint64_t fallback, uint64_t *value)
{
    const char *text = getenv(name);
    *value = fallback;
    if (!text || !*text)
        return ACL_SUCCESS;
    char *end;
    errno = 0;
    unsigned long long number = strtoull(text, &end, 10);
    if (errno || *end || *text < '0' || *text > '9' || number < least || number > most)
        return soft_error(ACL_ERROR_INVALID_PARAM, "%s=%s: want a decimal number from %llu to %llu", name, text,
                          (unsigned long long)least, (unsigned long long)most);
    *value = number;
    return ACL_SUCCESS;
}

static aclError read_strictness(soft_strictness *value)
{
    static const char *const words[] = { "", "hccs", "roce", "aicpu" };
    const char *text = getenv("SOFTNPU_STRICT");
    for (int i = 0; i < 4; i++)
        if (!strcmp(text ? text : "", words[i])) {
            *value = (soft_strictness)i;
            return ACL_SUCCESS;
        }
    return soft_error(ACL_ERROR_INVALID_PARAM, "SOFTNPU_STRICT=%s: want hccs, roce, aicpu, or nothing", text);
}

/* More than four do not make copies faster where this was measured; memory is what is slow. */
static uint64_t default_copiers(void)
{
    cpu_set_t ours;
    int count = sched_getaffinity(0, sizeof ours, &ours) ? 1 : CPU_COUNT(&ours);
    return count < 4 ? (uint64_t)count : 4;
}

aclError soft_settings_read(void)
{
    soft_strictness strict = SOFT_STRICT_NO;
    uint64_t devices, streams, inline_bytes, memory, copiers;
    SOFT_TRY(read_number("SOFTNPU_DEVICES", 1, SOFT_MAX_DEVICES, 8, &devices));
    SOFT_TRY(read_number("SOFTNPU_MAX_STREAMS", 1, INT32_MAX, 1984, &streams));   /* 1984: the limit of A2 and A3 */
    /* Waking a sleeping core costs about 70 us on the machine this was written on, as much as copying some 500 KiB. */
    SOFT_TRY(read_number("SOFTNPU_INLINE_BYTES", 0, 1ull << 40, 256ull << 10, &inline_bytes));
    SOFT_TRY(read_number("SOFTNPU_DEVICE_MEMORY", 1, 1ull << 50, atomic_load(&soft_setting.device_memory), &memory));
    SOFT_TRY(read_number("SOFTNPU_COPIERS", 1, 64, default_copiers(), &copiers));
    SOFT_TRY(read_strictness(&strict));
    soft_setting.strict = strict;
    soft_setting.devices = (int)devices;
    soft_setting.max_streams = (uint32_t)streams;
    soft_setting.inline_bytes = inline_bytes;
    soft_setting.copiers = (int)copiers;
    atomic_store(&soft_setting.device_memory, memory);
    return ACL_SUCCESS;
}

int softnpu_strictness(void)
{
    return (int)soft_setting.strict;
}

int softnpu_copiers(void)
{
    return soft_setting.copiers;
}

bool soft_is_strict(void)
{
    return soft_setting.strict != SOFT_STRICT_NO;
}

bool soft_is_hccs(void)
{
    return soft_setting.strict == SOFT_STRICT_HCCS || soft_setting.strict == SOFT_STRICT_AICPU;
}

int softnpu_set_memory_limit(uint64_t bytes)
{
    if (!bytes || bytes > 1ull << 50)
        return soft_error(ACL_ERROR_RT_PARAM_INVALID, "memory limit %llu: want 1 to 2^50 bytes", (unsigned long long)bytes);
    atomic_store(&soft_setting.device_memory, bytes);
    return ACL_SUCCESS;
}
