/* A rank table says which devices of which servers form a communicator:
 *   {"server_list": [{"server_id": "...", "device": [{"device_id": "0", "device_ip": "...", "rank_id": "0"}, ...]}, ...]}
 * softnpu needs only the ranks, which must be 0..n-1, each once; every other member is checked to be JSON and ignored, unless
 * SOFTNPU_STRICT makes hccl_strict_table.c look at it.
 * The text itself, without the space between its tokens, is part of the key by which the ranks find each other.       */
#include <string.h>
#include "hccl_soft.h"

typedef struct rank_set {
    uint64_t seen;                                      /* HCCL_RANKS_MAX bits */
    uint32_t devices;
    const char *wrong;                                  /* a broken rule of rank tables, not of JSON */
} rank_set;

static bool named(const char *key, size_t length, const char *name)
{
    return length == strlen(name) && !memcmp(key, name, length);
}

static bool refuse(rank_set *set, const char *wrong)
{
    set->wrong = wrong;
    return false;
}

static bool rank_id(hccl_json *json, rank_set *set, bool *found)
{
    const char *text;
    size_t length;
    uint32_t rank = 0;
    if (!hccl_json_string(json, &text, &length))
        return refuse(set, "rank_id must be a string of digits");
    for (size_t i = 0; i < length; i++) {
        if (text[i] < '0' || text[i] > '9')
            return refuse(set, "rank_id must be a string of digits");
        rank = rank * 10 + (uint32_t)(text[i] - '0');
        if (rank >= HCCL_RANKS_MAX)
            return refuse(set, "rank_id is too large");
    }
    if (length == 0 || *found)
        return refuse(set, "a device must have one rank_id");
    if (set->seen >> rank & 1)
        return refuse(set, "two devices have the same rank_id");
    set->seen |= (uint64_t)1 << rank;
    return *found = true;
}

typedef struct device_item { rank_set *set; bool found; } device_item;

static bool device_member(hccl_json *json, const char *key, size_t length, void *context)
{
    device_item *device = context;
    return named(key, length, "rank_id") ? rank_id(json, device->set, &device->found) : hccl_json_skip(json);
}

static bool device(hccl_json *json, const char *key, size_t length, void *context)
{
    (void)key, (void)length;
    device_item one = {context, false};
    if (!hccl_json_object(json, device_member, &one))
        return false;
    if (!one.found)
        return refuse(one.set, "a device has no rank_id");
    one.set->devices++;
    return true;
}

static bool server_member(hccl_json *json, const char *key, size_t length, void *context)
{
    return named(key, length, "device") ? hccl_json_array(json, device, context) : hccl_json_skip(json);
}

static bool server(hccl_json *json, const char *key, size_t length, void *context)
{
    (void)key, (void)length;
    return hccl_json_object(json, server_member, context);
}

static bool table_member(hccl_json *json, const char *key, size_t length, void *context)
{
    return named(key, length, "server_list") ? hccl_json_array(json, server, context) : hccl_json_skip(json);
}

void hccl_key_add(hccl_key *key, const void *bytes, size_t length)
{
    /* two multiplicative hashes: accidents are excluded, attacks are not */
    const unsigned char *at = bytes;
    for (size_t i = 0; i < length; i++) {
        key->word[0] = (key->word[0] ^ at[i]) * 0x9e3779b97f4a7c15u;
        key->word[0] ^= key->word[0] >> 29;
        key->word[1] = (key->word[1] + at[i] + 1) * 0xd6e8feb86659fd93u;
        key->word[1] ^= key->word[1] >> 32;
    }
}

static void key_add_table(hccl_key *key, const char *text, size_t length)
{
    bool quoted = false;
    for (size_t i = 0; i < length; i++) {
        if (!quoted && strchr(" \t\r\n", text[i]))
            continue;
        if (text[i] == '"')
            quoted = !quoted;
        hccl_key_add(key, &text[i], 1);
        if (quoted && text[i] == '\\')
            hccl_key_add(key, &text[++i], 1);   /* JSON already: something follows */
    }
}

HcclResult hccl_rank_table(const char *function, const char *text, size_t length, uint32_t rank, hccl_place *place,
                           hccl_key *key)
{
    rank_set set = {0, 0, NULL};
    hccl_json json = {text, text + length, 0};
    if (!hccl_json_object(&json, table_member, &set) || !hccl_json_end(&json))
        return soft_hccl_error(HCCL_E_PARA, "%s: rank table, byte %zu: %s", function, (size_t)(json.at - text),
                               set.wrong ? set.wrong : "malformed JSON");
    if (set.devices == 0)
        return soft_hccl_error(HCCL_E_PARA, "%s: the rank table names no device", function);
    if (set.seen != UINT64_MAX >> (64 - set.devices))
        return soft_hccl_error(HCCL_E_PARA, "%s: the rank table's %u rank_id values are not 0..%u", function, set.devices,
                               set.devices - 1);
    if (rank >= set.devices)
        return soft_hccl_error(HCCL_E_PARA, "%s: rank %u is not in the rank table, which has 0..%u", function, rank,
                               set.devices - 1);
    *place = (hccl_place){set.devices, 0};
    HcclResult code = hccl_strict_table(function, text, length, rank, &place->port);
    if (code)
        return code;
    key_add_table(key, text, length);
    return HCCL_SUCCESS;
}
