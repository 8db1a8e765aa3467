/* All-reduces through reducers in ns-3: hosts around one switch, TCP, ports that drop what does not
 * fit (drop tail). bench/opinions.py compiles it; it prints one JSON object. Processors cost
 * nothing. A worker begins its next all-reduce as soon as it has all results of the last one. */
#include <algorithm>
#include <functional>
#include <iostream>
#include <map>
#include <vector>

#include "ns3/core-module.h"
#include "ns3/internet-module.h"
#include "ns3/network-module.h"
#include "ns3/point-to-point-module.h"
#include "ns3/traffic-control-module.h"

using namespace ns3;

namespace {
struct { // sizes in bytes, times in seconds, rates in Gbit/s
    uint64_t workers = 4, reducers = 4, embedded = 0; // 1: worker i hosts reducer i
    uint64_t shard = 1 << 20, chunk = 1 << 18, window = 1 << 19; // the window is of one link
    uint64_t framing = 107, buffer = 1 << 20; // of a message besides its chunk; of a switch's port
    uint64_t rounds = 2;                      // all-reduces, one after the other
    uint64_t receive = 0; // TCP's receive window of each connection, both ways; 0: Linux'
    double worker = 10, reducer = 10, pace = 0; // the most of a connection each way; 0: no bound
    double delay = 25e-6, limit = 60; // from a host to another; simulated, until it gives up
    double jitter = 100e-6;           // the most that a worker waits before a round
    std::string congestion = "TcpCubic";
} job;

struct {
    uint64_t drops = 0, timeouts = 0, recoveries = 0, packets = 0;
    uint32_t longestQueue = 0; // bytes in a port of the switch
    std::vector<double> ends;  // of each round at its last worker, seconds
} seen;

uint64_t chunks; // of a shard

uint64_t ChunkBytes(uint64_t number)
{
    return std::min(job.chunk, job.shard - number % chunks * job.chunk);
}

void OnState(TcpSocketState::TcpCongState_t, TcpSocketState::TcpCongState_t now)
{
    seen.timeouts += now == TcpSocketState::CA_LOSS;
    seen.recoveries += now == TcpSocketState::CA_RECOVERY;
}

/* One end of a connection: sends chunks in order, and says when one has come whole. */
class End : public SimpleRefCount<End> {
  public:
    std::function<void()> onChunk;

    void Take(Ptr<Socket> socket)
    {
        m_socket = socket;
        socket->SetRecvCallback(MakeCallback(&End::Receive, this));
        socket->SetSendCallback([this](Ptr<Socket>, uint32_t) { Fill(); });
        socket->TraceConnectWithoutContext("CongState", MakeCallback(&OnState));
        Fill();
    }

    /* Sends the next chunk; over no network if there is no socket. */
    void Send(End* other)
    {
        m_unsent += ChunkBytes(m_sent++) + job.framing;
        if (m_socket)
            Fill();
        else
            Simulator::ScheduleNow([other] { other->onChunk(); });
    }

  private:
    void Fill()
    {
        for (int sent = 1; m_unsent > 0 && sent > 0; m_unsent -= std::max(sent, 0)) {
            uint32_t room = std::min<uint64_t>({m_unsent, m_socket->GetTxAvailable(), 65536});
            sent = room == 0 ? 0 : m_socket->Send(Create<Packet>(room));
        }
    }

    void Receive(Ptr<Socket> socket)
    {
        while (Ptr<Packet> packet = socket->Recv()) {
            m_received += packet->GetSize();
            while (m_received >= ChunkBytes(m_got) + job.framing) {
                m_received -= ChunkBytes(m_got++) + job.framing;
                onChunk();
            }
        }
    }

    Ptr<Socket> m_socket;
    uint64_t m_unsent = 0, m_received = 0, m_sent = 0, m_got = 0;
};

struct Link { // of one worker and one reducer
    Ptr<End> worker = Create<End>(), reducer = Create<End>();
    uint64_t sent = 0, done = 0, inFlight = 0; // chunks, chunks, bytes
    uint64_t came = 0;                         // contributions, at the reducer
};

std::vector<std::vector<Link>> links;     // by worker, then reducer
std::vector<uint64_t> turns, rounds;      // of each worker: the link that is next; those ended
std::vector<std::vector<uint32_t>> slots; // of each reducer: contributions to each chunk

/* Sends what the windows of a worker allow, one chunk a link in turn. */
void Pump(uint32_t w)
{
    for (uint32_t idle = 0; idle < job.reducers;) {
        Link& link = links[w][(w + turns[w]++) % job.reducers];
        uint64_t size = ChunkBytes(link.sent);
        bool fits = link.inFlight == 0 || link.inFlight + size <= job.window;
        idle = fits && link.sent < (rounds[w] + 1) * chunks ? 0 : idle + 1;
        if (idle > 0)
            continue;
        link.sent++;
        link.inFlight += size;
        link.worker->Send(PeekPointer(link.reducer));
    }
}

/* Ranks never begin at the same time; nor would their packets stay in step. */
void Begin(uint32_t w, double start)
{
    static Ptr<UniformRandomVariable> random = CreateObject<UniformRandomVariable>();
    Simulator::Schedule(Seconds(start + random->GetValue(0, job.jitter)), [w] { Pump(w); });
}

void Contributed(uint32_t w, uint32_t r)
{
    uint64_t chunk = links[w][r].came++;
    slots[r].resize(std::max<size_t>(slots[r].size(), chunk + 1));
    if (++slots[r][chunk] < job.workers)
        return;
    for (uint32_t i = 0; i < job.workers; i++) {
        Link& link = links[(chunk + r + i) % job.workers][r];
        link.reducer->Send(PeekPointer(link.worker));
    }
}

void Answered(uint32_t w, uint32_t r)
{
    Link& link = links[w][r];
    link.inFlight -= ChunkBytes(link.done++);
    bool whole = std::all_of(links[w].begin(), links[w].end(), [w](const Link& each) {
        return each.done == (rounds[w] + 1) * chunks;
    });
    if (whole && ++rounds[w] == *std::min_element(rounds.begin(), rounds.end()))
        seen.ends.push_back(Simulator::Now().GetSeconds());
    if (seen.ends.size() == job.rounds)
        Simulator::Stop();
    else if (!whole)
        Pump(w);
    else if (rounds[w] < job.rounds)
        Begin(w, 0);
}

/* Puts a host on the switch; returns its address. */
Ipv4Address Attach(Ptr<Node> host, Ptr<Node> hub, double gbps)
{
    static Ipv4AddressHelper addresses("10.0.0.0", "255.255.255.252");
    PointToPointHelper wire;
    /* As many packets a second as Ethernet, whose header has 12 bytes more than PPP's. */
    wire.SetDeviceAttribute("DataRate", DataRateValue(uint64_t(gbps * 1e9 * 1502 / 1514)));
    wire.SetChannelAttribute("Delay", TimeValue(Seconds(job.delay / 2)));
    NetDeviceContainer ends = wire.Install(host, hub);
    Callback<void, uint32_t, uint32_t> queue(
        [](uint32_t, uint32_t held) { seen.longestQueue = std::max(seen.longestQueue, held); });
    auto port = DynamicCast<PointToPointNetDevice>(ends.Get(1));
    port->GetQueue()->SetMaxSize(QueueSize(QueueSizeUnit::BYTES, job.buffer));
    port->GetQueue()->TraceConnectWithoutContext("BytesInQueue", queue);
    /* A host's connections share its card fairly and lose nothing there, as with Linux' fq: each has a
     * queue of its own, where hashes into 1024 would have some share one. */
    TrafficControlHelper fair;
    fair.SetRootQueueDisc("ns3::FqCoDelQueueDisc", "Target", StringValue("100s"), "Interval",
                          StringValue("1000s"), "MaxSize", StringValue("10000000p"), "Flows",
                          UintegerValue(1 << 20));
    fair.Install(ends.Get(0));
    Ipv4InterfaceContainer given = addresses.Assign(ends);
    fair.Uninstall(ends.Get(1)); // which Assign has installed
    addresses.NewNetwork();
    Ipv4StaticRoutingHelper().GetStaticRouting(host->GetObject<Ipv4>())->SetDefaultRoute(
        given.GetAddress(1), 1);
    return given.GetAddress(0);
}

void Connect(const NodeContainer& hosts, const std::vector<Ipv4Address>& addresses)
{
    TypeId factory = TcpSocketFactory::GetTypeId();
    for (uint32_t r = 0; r < job.reducers; r++) {
        uint32_t at = job.embedded ? r : job.workers + r;
        for (uint32_t w = 0; w < job.workers; w++) {
            Ptr<End> worker = links[w][r].worker, reducer = links[w][r].reducer;
            reducer->onChunk = [w, r] { Contributed(w, r); };
            worker->onChunk = [w, r] { Answered(w, r); };
            if (job.embedded && w == r)
                continue;
            Ptr<Socket> listener = Socket::CreateSocket(hosts.Get(at), factory);
            listener->Bind(InetSocketAddress(Ipv4Address::GetAny(), 1000 + w));
            listener->Listen();
            listener->SetAcceptCallback(
                MakeNullCallback<bool, Ptr<Socket>, const Address&>(),
                [reducer](Ptr<Socket> socket, const Address&) { reducer->Take(socket); });
            Ptr<Socket> socket = Socket::CreateSocket(hosts.Get(w), factory);
            socket->Bind();
            socket->Connect(InetSocketAddress(addresses[at], 1000 + w));
            worker->Take(socket);
        }
    }
}

void Configure()
{
    for (auto [name, value] : std::map<std::string, std::string>{
             {"TcpL4Protocol::SocketType", "ns3::" + job.congestion},
             {"TcpSocket::SegmentSize", "1448"},
             {"TcpSocket::SndBufSize", "4194304"},
             {"TcpSocket::RcvBufSize", std::to_string(job.receive > 0 ? job.receive : 6291456)},
             {"TcpSocket::InitialCwnd", "10"},
             {"TcpSocket::DelAckTimeout", "40ms"},
             {"TcpSocketBase::MinRto", "200ms"}, // Linux' least
             {"TcpSocketBase::Sack", "true"},
             {"TcpSocketState::EnablePacing", job.pace > 0 ? "true" : "false"},
             {"TcpSocketState::MaxPacingRate", std::to_string(uint64_t(job.pace * 1e9)) + "bps"},
             {"DropTailQueue<Packet>::MaxSize", "10p"}}) // of a host's card
        Config::SetDefault("ns3::" + name, StringValue(value));
}
} // namespace

int main(int count, char* words[])
{
    CommandLine line(__FILE__);
    for (auto [name, field] : std::map<std::string, uint64_t*>{
             {"workers", &job.workers}, {"reducers", &job.reducers}, {"embedded", &job.embedded},
             {"shard", &job.shard}, {"chunk", &job.chunk}, {"window", &job.window},
             {"framing", &job.framing}, {"buffer", &job.buffer}, {"rounds", &job.rounds},
             {"receive", &job.receive}})
        line.AddValue(name, "", *field);
    for (auto [name, field] : std::map<std::string, double*>{
             {"worker-gbps", &job.worker}, {"reducer-gbps", &job.reducer}, {"pace", &job.pace},
             {"delay", &job.delay}, {"limit", &job.limit}, {"jitter", &job.jitter}})
        line.AddValue(name, "", *field);
    line.AddValue("congestion", "", job.congestion);
    line.Parse(count, words);
    Configure();
    chunks = (job.shard + job.chunk - 1) / job.chunk;
    for (uint32_t w = 0; w < job.workers; w++)
        links.emplace_back(job.reducers); // each link with ends of its own
    turns.resize(job.workers), rounds.resize(job.workers), slots.resize(job.reducers);
    NodeContainer hosts(job.workers + (job.embedded ? 0 : job.reducers)), hub(1);
    InternetStackHelper stack;
    stack.SetIpv6StackInstall(false);
    stack.Install(hosts);
    stack.Install(hub);
    std::vector<Ipv4Address> addresses;
    for (uint32_t i = 0; i < hosts.GetN(); i++)
        addresses.push_back(
            Attach(hosts.Get(i), hub.Get(0), i < job.workers ? job.worker : job.reducer));
    /* A port whose queue is full stops, and what is for it is dropped before it. */
    Callback<void, Ptr<const Packet>> drop([](Ptr<const Packet>) { seen.drops++; });
    hub.Get(0)->GetObject<TrafficControlLayer>()->TraceConnectWithoutContext("TcDrop", drop);
    /* Hosts have queues from time 0 on. */
    Simulator::Schedule(Seconds(0.1), [&] { Connect(hosts, addresses); });
    double start = 4; // all are connected by then, even those whose SYN is sent again
    for (uint32_t w = 0; w < job.workers; w++)
        Begin(w, start);
    Simulator::Stop(Seconds(start + job.limit));
    Simulator::Run();
    for (uint32_t i = 0; i < hosts.GetN(); i++) {
        auto port = DynamicCast<PointToPointNetDevice>(hub.Get(0)->GetDevice(i + 1));
        seen.drops += port->GetQueue()->GetTotalDroppedPackets();
        seen.packets += port->GetQueue()->GetTotalReceivedPackets();
    }
    std::cout << "{\"ends\": [";
    for (double end : seen.ends)
        std::cout << (end == seen.ends[0] ? "" : ", ") << end - start;
    std::cout << "], \"drops\": " << seen.drops << ", \"packets\": " << seen.packets
              << ", \"timeouts\": " << seen.timeouts << ", \"recoveries\": " << seen.recoveries
              << ", \"longest_queue\": " << seen.longestQueue << "}\n";
}
