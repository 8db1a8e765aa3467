#include "worker_client/nccl/interfaces.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST = 16, UNKNOWN_MBIT = 10000 };

static struct interface found[MOST];
static int count;
static pthread_once_t looked = PTHREAD_ONCE_INIT;

socklen_t interface_address_bytes(const struct interface *interface)
{
    bool v4 = interface->address.any.sa_family == AF_INET;
    return v4 ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6);
}

/* Whether NCCL_SOCKET_IFNAME's value means a name. */
static bool listed(const char *name, const char *list)
{
    bool others = list[0] == '^';
    list += others;
    bool exact = list[0] == '=';
    list += exact;
    for (const char *end; *list != '\0'; list = *end == '\0' ? end : end + 1) {
        end = strchrnul(list, ',');
        size_t length = (size_t)(end - list);
        if (length > 0 && strncmp(name, list, length) == 0 && (!exact || name[length] == '\0'))
            return !others;
    }
    return others;
}

/* Whether REDUCTION_INTERFACE's value means an interface. */
static bool meant(const struct interface *interface, const char *wanted)
{
    if (strcmp(interface->name, wanted) == 0 || strcmp(interface->text, wanted) == 0)
        return true;
    char text[INET6_ADDRSTRLEN];
    const char *slash = strchr(wanted, '/');
    if (slash == NULL || (size_t)(slash - wanted) >= sizeof text)
        return false;
    memcpy(text, wanted, (size_t)(slash - wanted));
    text[slash - wanted] = '\0';
    unsigned char network[sizeof(struct in6_addr)];
    int family = interface->address.any.sa_family;
    const unsigned char *own = family == AF_INET
                                   ? (const unsigned char *)&interface->address.v4.sin_addr
                                   : (const unsigned char *)&interface->address.v6.sin6_addr;
    unsigned long bits = strtoul(slash + 1, NULL, 10);
    if (inet_pton(family, text, network) != 1 || bits > (family == AF_INET ? 32 : 128))
        return false;
    for (unsigned long bit = 0; bit < bits; bit++)
        if ((own[bit / 8] ^ network[bit / 8]) & (0x80 >> bit % 8))
            return false;
    return true;
}

static bool leads_out(const char *name)
{
    static const char *const INSIDE[] = {"lo", "docker", "veth", "br-", "virbr", "cni"};
    for (size_t at = 0; at < sizeof INSIDE / sizeof *INSIDE; at++)
        if (strncmp(name, INSIDE[at], strlen(INSIDE[at])) == 0)
            return false;
    return true;
}

/* What sysfs says of it. */
static void describe(struct interface *interface)
{
    char path[64 + IF_NAMESIZE];
    snprintf(path, sizeof path, "/sys/class/net/%s/device", interface->name);
    if (realpath(path, interface->pci_path) == NULL)
        interface->pci_path[0] = '\0';
    snprintf(path, sizeof path, "/sys/class/net/%s/speed", interface->name);
    FILE *file = fopen(path, "re");
    if (file == NULL || fscanf(file, "%d", &interface->speed_mbit) != 1 ||
        interface->speed_mbit <= 0)
        interface->speed_mbit = UNKNOWN_MBIT; /* a virtual one */
    if (file != NULL)
        fclose(file);
}

/* False: it has no address that connections can be made to, or is there already. */
static bool read_address(struct interface *interface, const struct ifaddrs *entry)
{
    if (entry->ifa_addr == NULL || !(entry->ifa_flags & IFF_UP) ||
        strlen(entry->ifa_name) >= IF_NAMESIZE)
        return false;
    int family = entry->ifa_addr->sa_family;
    const struct sockaddr_in6 *v6 = (const void *)entry->ifa_addr;
    if (family != AF_INET && (family != AF_INET6 || IN6_IS_ADDR_LINKLOCAL(&v6->sin6_addr)))
        return false;
    for (int at = 0; at < count; at++)
        if (strcmp(found[at].name, entry->ifa_name) == 0)
            return false;
    memset(interface, 0, sizeof *interface);
    strcpy(interface->name, entry->ifa_name);
    interface->address.any.sa_family = (sa_family_t)family;
    memcpy(&interface->address, entry->ifa_addr, interface_address_bytes(interface));
    const void *host = family == AF_INET ? (const void *)&interface->address.v4.sin_addr
                                         : (const void *)&interface->address.v6.sin6_addr;
    return inet_ntop(family, host, interface->text, sizeof interface->text) != NULL;
}

static void look(void)
{
    const char *wanted = getenv("REDUCTION_INTERFACE"), *list = getenv("NCCL_SOCKET_IFNAME");
    wanted = wanted != NULL && wanted[0] != '\0' ? wanted : NULL;
    list = list != NULL && list[0] != '\0' ? list : NULL;
    struct ifaddrs *entries;
    if (getifaddrs(&entries) != 0)
        return;
    for (int loopback = 0; loopback < 2 && count == 0; loopback++)
        for (struct ifaddrs *entry = entries; entry != NULL && count < MOST; entry = entry->ifa_next) {
            struct interface *next = &found[count];
            if (!read_address(next, entry))
                continue;
            bool taken = wanted != NULL ? meant(next, wanted)
                         : list != NULL ? listed(next->name, list)
                         : loopback     ? strcmp(next->name, "lo") == 0
                                        : leads_out(next->name);
            if (taken) {
                describe(next);
                count++;
            }
        }
    freeifaddrs(entries);
}

int interfaces_count(void)
{
    pthread_once(&looked, look);
    return count;
}

const struct interface *interfaces_get(int number)
{
    return number >= 0 && number < interfaces_count() ? &found[number] : NULL;
}
