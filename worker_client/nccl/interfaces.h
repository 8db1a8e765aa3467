/* This machine's network interfaces, which are NCCL's devices. */
#ifndef WORKER_NCCL_INTERFACES_H
#define WORKER_NCCL_INTERFACES_H

#include <limits.h>
#include <net/if.h>
#include <netinet/in.h>

union address {
    struct sockaddr any;
    struct sockaddr_in v4;
    struct sockaddr_in6 v6;
};

struct interface {
    char name[IF_NAMESIZE], text[INET6_ADDRSTRLEN]; /* of its address */
    char pci_path[PATH_MAX];                        /* in sysfs; empty: it is not on that bus */
    union address address;
    int speed_mbit;
};

/* How many there are: those that REDUCTION_INTERFACE means (a name, an address or a network such as
 * 10.0.0.0/8), else NCCL_SOCKET_IFNAME (beginnings of names, `=` names, `^` others than), else those
 * that are up and lead to other machines, else the loopback. They stay as they were when first asked
 * for. */
int interfaces_count(void);
/* NULL: there is none of that number. */
const struct interface *interfaces_get(int number);
socklen_t interface_address_bytes(const struct interface *interface);

#endif
