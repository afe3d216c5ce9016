/* SOFTNPU_STRICT: a rank table is complete, and tells the truth about this device. Beside what hccl_ranktable.c wants of it:
 *
 *   version        "1.0" or "1.2"                            server_list[].server_id              once each
 *   status         "completed"                               server_list[].device[].device_id     a physical id, in digits
 *   server_count   as many as server_list has; optional      server_list[].device[].device_ip     once each; optional where
 *                                                            one server is all, and its links are not RoCE
 *
 *   server_list[].device[].device_port   1 to 65535; optional
 *
 * All else is HCCL_E_PARA, but a device_id of this rank's that is not this device's physical id: HCCL_E_UNAVAIL.
 * [src hcomm topoinfo_ranktableConcise.cc GetServerList, GetSingleServer, GetSingleDevice, GetSingleDeviceIp, ParserClusterInfo;
 * topoinfo_ranktableParser.cc RefreshStatus, CheckUniqueAndInsertPool] */
#include <stdlib.h>
#include <string.h>
#include "hccl_soft.h"

typedef struct word { const char *text; size_t length; } word;
typedef struct words { word item[HCCL_RANKS_MAX]; uint32_t count; } words;
typedef struct device_entry { word id, ip, port, rank; } device_entry;

typedef struct strict_table {
    uint32_t rank;
    word version, status, server_count, own_device, own_port;
    words server_ids, device_ips;
    uint32_t servers;
    bool lacks_ip;
    const char *wrong;
} strict_table;

typedef struct server_entry { strict_table *table; word id; uint32_t devices; } server_entry;

static bool is(word value, const char *text)
{
    return value.text && value.length == strlen(text) && !memcmp(value.text, text, value.length);
}

static bool same(word one, word other)
{
    return one.length == other.length && !memcmp(one.text, other.text, one.length);
}

/* -1: no decimal number, or too large for one here */
static int64_t number(word value)
{
    int64_t result = value.length && value.length < 10 ? 0 : -1;
    for (size_t i = 0; result >= 0 && i < value.length; i++)
        result = value.text[i] >= '0' && value.text[i] <= '9' ? result * 10 + (value.text[i] - '0') : -1;
    return result;
}

static bool refuse(strict_table *table, const char *wrong)
{
    if (!table->wrong)
        table->wrong = wrong;
    return false;
}

static bool add(words *all, word value)
{
    for (uint32_t i = 0; i < all->count; i++)
        if (same(all->item[i], value))
            return false;
    if (all->count == HCCL_RANKS_MAX)
        return false;
    all->item[all->count++] = value;
    return true;
}

typedef struct field { const char *name; word *value; } field;

/* Takes a string into the field of that name; any other member is skipped. */
static bool take(hccl_json *json, const char *key, size_t length, const field *fields, strict_table *table)
{
    for (; fields->name; fields++)
        if (is((word){ key, length }, fields->name))
            return hccl_json_string(json, &fields->value->text, &fields->value->length)
                || refuse(table, "version, status, server_count, server_id, device_id, device_ip and device_port must be strings");
    return hccl_json_skip(json);
}

/* ---- devices ---- */

typedef struct device_walk { device_entry entry; strict_table *table; } device_walk;

static bool device_member(hccl_json *json, const char *key, size_t length, void *context)
{
    device_walk *walk = context;
    const field fields[] = { { "device_id", &walk->entry.id }, { "device_ip", &walk->entry.ip },
        { "device_port", &walk->entry.port }, { "rank_id", &walk->entry.rank }, { 0 } };
    return take(json, key, length, fields, walk->table);
}

static bool device(hccl_json *json, const char *key, size_t length, void *context)
{
    (void)key, (void)length;
    server_entry *server = context;
    device_walk walk = { .table = server->table };
    if (!hccl_json_object(json, device_member, &walk))
        return false;
    const device_entry *entry = &walk.entry;
    if (number(entry->id) < 0)
        return refuse(server->table, "each device must have a device_id, a physical id in decimal digits");
    if (entry->ip.length && !add(&server->table->device_ips, entry->ip))
        return refuse(server->table, "two devices have the same device_ip");
    server->table->lacks_ip |= !entry->ip.length;
    if (entry->port.text && (number(entry->port) < 1 || number(entry->port) > UINT16_MAX))
        return refuse(server->table, "device_port must be 1 to 65535, in decimal digits");
    if (number(entry->rank) == server->table->rank) {
        server->table->own_device = entry->id;
        server->table->own_port = entry->port;
    }
    server->devices++;
    return true;
}

/* ---- servers ---- */

static bool server_member(hccl_json *json, const char *key, size_t length, void *context)
{
    server_entry *server = context;
    const field fields[] = { { "server_id", &server->id }, { 0 } };
    if (is((word){ key, length }, "device"))
        return hccl_json_array(json, device, server);
    return take(json, key, length, fields, server->table);
}

static bool server(hccl_json *json, const char *key, size_t length, void *context)
{
    (void)key, (void)length;
    server_entry entry = { .table = context };
    if (!hccl_json_object(json, server_member, &entry))
        return false;
    if (!entry.id.length || !entry.devices)
        return refuse(entry.table, "each server must have a server_id and at least one device");
    if (!add(&entry.table->server_ids, entry.id))
        return refuse(entry.table, "two servers have the same server_id");
    entry.table->servers++;
    return true;
}

/* ---- the table ---- */

static bool table_member(hccl_json *json, const char *key, size_t length, void *context)
{
    strict_table *table = context;
    const field fields[] = { { "version", &table->version }, { "status", &table->status },
        { "server_count", &table->server_count }, { 0 } };
    if (is((word){ key, length }, "server_list"))
        return hccl_json_array(json, server, table);
    return take(json, key, length, fields, table);
}

static void check_whole(strict_table *table)
{
    if (!is(table->version, "1.0") && !is(table->version, "1.2"))
        refuse(table, "version must be 1.0 or 1.2");
    if (!is(table->status, "completed"))
        refuse(table, "status must be completed");
    if (table->server_count.text && number(table->server_count) != table->servers)
        refuse(table, "server_count must be the number of servers in server_list");
    if (table->lacks_ip && (!soft_is_hccs() || table->servers > 1))
        refuse(table, "each device must have a device_ip if links are RoCE, or go to another server");
}

HcclResult hccl_strict_table(const char *function, const char *text, size_t length, uint32_t rank, uint32_t *port)
{
    hccl_json json = { text, text + length, 0 };
    strict_table table = { .rank = rank };
    if (!soft_is_strict())
        return HCCL_SUCCESS;
    if (hccl_json_object(&json, table_member, &table))
        check_whole(&table);
    else
        refuse(&table, "server_list and device must be arrays, each server and each device an object");
    if (table.wrong)
        return soft_hccl_error(HCCL_E_PARA, "%s: rank table: %s", function, table.wrong);
    if (number(table.own_device) != soft_current_device())
        return soft_hccl_error(HCCL_E_UNAVAIL, "%s: the rank table says that rank %u is on device_id %.*s, and this thread's device "
                               "has the physical id %d", function, rank, (int)table.own_device.length, table.own_device.text,
                               soft_current_device());
    *port = table.own_port.text ? (uint32_t)number(table.own_port) : 0;
    return HCCL_SUCCESS;
}
