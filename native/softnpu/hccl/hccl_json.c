/* A strict JSON reader over a bounded text. It builds nothing: the caller walks down to what it wants and skips the rest.
 * Every function returns false on the first byte that is not JSON, and then the text is given up.                    */
#include <string.h>
#include "hccl_soft.h"

#define DEPTH_MAX 32                                    /* the recursion is bounded by it */

static int peek(hccl_json *json)
{
    while (json->at < json->end && strchr(" \t\r\n", *json->at) && *json->at)
        json->at++;
    return json->at < json->end ? (unsigned char)*json->at : -1;
}

static bool take(hccl_json *json, char wanted)
{
    if (peek(json) != wanted)
        return false;
    json->at++;
    return true;
}

static bool hex(int c)
{
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F');
}

static bool escape(hccl_json *json)
{
    if (json->at == json->end)
        return false;
    char c = *json->at++;
    if (c != 'u')
        return c && strchr("\"\\/bfnrt", c);
    for (int i = 0; i < 4; i++)
        if (json->at == json->end || !hex(*json->at++))
            return false;
    return true;
}

bool hccl_json_string(hccl_json *json, const char **text, size_t *length)
{
    if (!take(json, '"'))
        return false;
    *text = json->at;
    while (json->at < json->end) {
        unsigned char c = (unsigned char)*json->at++;
        if (c == '"') {
            *length = (size_t)(json->at - 1 - *text);
            return true;
        }
        if (c < 0x20 || (c == '\\' && !escape(json)))
            return false;
    }
    return false;
}

static bool digits(hccl_json *json)
{
    const char *start = json->at;
    while (json->at < json->end && *json->at >= '0' && *json->at <= '9')
        json->at++;
    return json->at > start;
}

static bool number(hccl_json *json)
{
    if (*json->at == '-')
        json->at++;
    if (json->at < json->end && *json->at == '0')
        json->at++;
    else if (!digits(json))
        return false;
    if (json->at < json->end && *json->at == '.') {
        json->at++;
        if (!digits(json))
            return false;
    }
    if (json->at < json->end && (*json->at == 'e' || *json->at == 'E')) {
        json->at++;
        if (json->at < json->end && (*json->at == '+' || *json->at == '-'))
            json->at++;
        if (!digits(json))
            return false;
    }
    return true;
}

static bool word(hccl_json *json, const char *wanted)
{
    size_t length = strlen(wanted);
    if ((size_t)(json->end - json->at) < length || memcmp(json->at, wanted, length))
        return false;
    json->at += length;
    return true;
}

static bool item(hccl_json *json, bool keyed, hccl_json_item *visit, void *context)
{
    const char *key = NULL;
    size_t length = 0;
    if (keyed && !(hccl_json_string(json, &key, &length) && take(json, ':')))
        return false;
    return visit(json, key, length, context);
}

static bool container(hccl_json *json, char open, char close, hccl_json_item *visit, void *context)
{
    if (json->depth == DEPTH_MAX || !take(json, open))
        return false;
    json->depth++;
    if (peek(json) != close)
        do {
            if (!item(json, open == '{', visit, context))
                return false;
        } while (take(json, ','));
    json->depth--;
    return take(json, close);
}

bool hccl_json_object(hccl_json *json, hccl_json_item *visit, void *context)
{
    return container(json, '{', '}', visit, context);
}

bool hccl_json_array(hccl_json *json, hccl_json_item *visit, void *context)
{
    return container(json, '[', ']', visit, context);
}

static bool skip_item(hccl_json *json, const char *key, size_t length, void *context)
{
    (void)key, (void)length, (void)context;
    return hccl_json_skip(json);
}

bool hccl_json_skip(hccl_json *json)
{
    const char *text;
    size_t length;
    switch (peek(json)) {
    case '{': return hccl_json_object(json, skip_item, NULL);
    case '[': return hccl_json_array(json, skip_item, NULL);
    case '"': return hccl_json_string(json, &text, &length);
    case 't': return word(json, "true");
    case 'f': return word(json, "false");
    case 'n': return word(json, "null");
    case -1:  return false;
    default:  return number(json);
    }
}

bool hccl_json_end(hccl_json *json)
{
    return peek(json) == -1;
}
