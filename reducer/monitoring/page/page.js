// Follows reducers: asks their HTTP ports again and again, and shows what they say. What it reads
// is a stranger's text, names of jobs above all, so it becomes text of the page and nothing else.

"use strict";

const POLL_MS = 1000;
const SILENT_MS = 2600; // a reducer whose thread hangs answers after 2 s
const PATIENCE_MS = 1500; // of a question, if a tab in the background has asked none for long
const TIMEOUT_MS = 4000;
const HISTORY_MS = 2000;
const SPAN_S = 600; // that the chart shows
const GAP_S = 12; // between two samples: what was between them is not known
const WINDOW_S = 10; // over which waits are looked at
const MOST_LOOKS = 30; // in that time, whatever a reducer says of it
const LEVELS = [0.02, 0.1, 0.25]; // of the time, from which on a rank has another colour
const MOST_CELLS = 128; // of a job; each stands for several ranks if there are more
const STRIP_CELLS = 120; // of a rank, over the last ten minutes
const MOST_STRIPS = 16; // of a job
const WORSE = " .lsLSa"; // letters of cells, each worse than the one before
const SHOWN_JOBS = 12;
const SHOWN_EVENTS = 25;
const SAME_EVENT_S = 3; // several threads or reducers that say the same at once
const MEASURED = /for \d+% of the time, .+ each: /; // by each of them for itself
const NO_REDUCER = "answers, but not as a reducer does";
const SVG = "http://www.w3.org/2000/svg";
const MAX_RANKS = 65536;
const LAST_S = 1e11; // of Unix time, that a date can be made of
const MOVED = ["bytes_in", "bytes_out", "all_reduces"]; // by a job

// -- what is known ---------------------------------------------------------------------------

/** One reducer: what it said last, and when. */
class Reducer {
  /** @param {string} name its HTTP port. @param {string} base what its paths begin with. */
  constructor(name, base) {
    this.name = name;
    this.base = base;
    this.status = null;
    this.history = null;
    this.looks = []; // earlier statuses, for rates and waits of the last seconds
    this.heardMs = 0;
    this.asked = null; // when the question was asked that is still open
    this.failed = ""; // why the last question got no answer
    this.historyMs = -HISTORY_MS;
  }

  /** Whether it does not answer now. */
  get silent() {
    const dueMs = Math.max(this.heardMs + SILENT_MS, this.asked + PATIENCE_MS);
    return this.failed !== "" || (this.asked !== null && performance.now() > dueMs);
  }

  /** Ask for its status, and now and then for its history. */
  async ask() {
    this.asked = performance.now();
    try {
      const status = checkedStatus(await this.read("status.json"));
      if (this.status && this.status.incarnation !== status.incarnation) {
        this.looks = [];
        this.historyMs = -HISTORY_MS;
      }
      this.status = status;
      this.looks.push(status);
      this.looks = this.looks.slice(-MOST_LOOKS);
      while (this.looks.length > 2 && status.uptime_s - this.looks[1].uptime_s >= WINDOW_S) {
        this.looks.shift();
      }
      this.heardMs = performance.now();
      if (performance.now() - this.historyMs >= HISTORY_MS) {
        this.history = checkedHistory(await this.read("history.json"));
        this.historyMs = performance.now();
      }
      this.failed = "";
    } catch (error) {
      this.failed = error instanceof Unreadable ? error.message : "does not answer";
    }
    this.asked = null;
  }

  async read(path) {
    const signal = AbortSignal.timeout(TIMEOUT_MS);
    const options = { cache: "no-store", credentials: "omit", signal };
    const answer = await fetch(this.base + path, options);
    if (!answer.ok) {
      throw new Unreadable(`answers, but not as a reducer of this version (${answer.status})`);
    }
    try {
      return JSON.parse(await answer.text());
    } catch (error) {
      throw error instanceof SyntaxError ? new Unreadable(NO_REDUCER) : error;
    }
  }

  /** Go on asking. */
  async follow() {
    for (;;) {
      const began = performance.now();
      await this.ask();
      show();
      const restMs = Math.max(50, began + POLL_MS - performance.now());
      await new Promise((done) => setTimeout(done, restMs));
    }
  }
}

class Unreadable extends Error {}

function areNumbers(record, names) {
  return Boolean(record) && names.every((name) => Number.isFinite(record[name]));
}

function isJob(job) {
  return job && typeof job.name === "string" && typeof job.ranks_present === "string" &&
    typeof job.ranks_absent === "string" && Array.isArray(job.costliest_ranks) &&
    job.costliest_ranks.every((one) => areNumbers(one, ["rank", "late_s", "slow_s"])) &&
    (!job.straggler || areNumbers(job.straggler, ["rank", "share", "median_s"])) &&
    (!job.traffic || areNumbers(job.traffic, MOVED)) &&
    (!job.lately || areNumbers(job.lately, [...MOVED, "seconds", "median_s", "p99_s"])) &&
    Object.values(job.hosts ?? {}).every((said) => typeof said === "string") &&
    areNumbers(job, ["generation", "world_size", "present", "reserved", "held", "rounds"]) &&
    job.world_size <= MAX_RANKS;
}

function checkedStatus(told) {
  const isRight = told && typeof told.state === "string" && typeof told.incarnation === "string" &&
    areNumbers(told, ["uptime_s", "jobs_total"]) && Array.isArray(told.lanes) &&
    areNumbers(told.memory, ["limit", "reserved", "held"]) &&
    areNumbers(told.counters, ["bytes_in", "bytes_out"]) &&
    Array.isArray(told.jobs) && told.jobs.every(isJob);
  if (!isRight) {
    throw new Unreadable(NO_REDUCER);
  }
  return told;
}

function checkedHistory(told) {
  const isRight = told && typeof told.incarnation === "string" && areNumbers(told, ["now"]) &&
    Array.isArray(told.samples) && Array.isArray(told.events) &&
    told.samples.every((one) => areNumbers(one, ["uptime_s", "bytes_in", "bytes_out"])) &&
    told.events.every((one) => areNumbers(one, ["at"]) && Math.abs(one.at) < LAST_S &&
      typeof one.text === "string") &&
    (told.strips ?? []).every((job) => job && Array.isArray(job.ranks) && job.ranks.every((one) =>
      areNumbers(one, ["rank", "waited_s"]) && typeof one.cells === "string" &&
      one.cells.length <= STRIP_CELLS));
  if (!isRight) {
    throw new Unreadable(NO_REDUCER);
  }
  // By this machine's clock, whatever the reducer's says.
  const ahead = Date.now() / 1000 - told.now;
  return { ...told, events: told.events.map((event) => ({ ...event, at: event.at + ahead })) };
}

function named() {
  const query = new URLSearchParams(location.search).getAll("reducers").join(",");
  const words = new Set(query.split(",").map((word) => word.trim()));
  const others = [...words].filter((word) => word !== "" && word !== location.host);
  return [
    new Reducer(location.host, ""),
    ...others.map((one) => new Reducer(one, `http://${one}/`)),
  ];
}

const reducers = named();

/** The reducers, without one that is here under two names. */
function distinct() {
  const seen = new Set();
  return reducers.filter((one) => {
    const known = one.status ? one.status.incarnation : one.name;
    return !seen.has(known) && seen.add(known);
  });
}

// -- words -----------------------------------------------------------------------------------

function size(bytes) {
  const units = ["B", "kB", "MB", "GB"];
  for (const unit of units) {
    if (bytes < 999.5) {
      return `${Number(bytes.toPrecision(3))} ${unit}`;
    }
    bytes /= 1000;
  }
  return `${Number(bytes.toPrecision(3))} TB`;
}

function duration(seconds) {
  const whole = Math.round(seconds);
  if (whole < 120) {
    return `${whole} s`;
  }
  const minutes = Math.floor(whole / 60);
  if (minutes < 120) {
    return `${minutes} min`;
  }
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h` : `${Math.floor(hours / 24)} days`;
}

function count(number, one, many) {
  return `${number.toLocaleString("en")} ${number === 1 ? one : many}`;
}

function percent(share) {
  return `${Math.round(100 * share)} %`;
}

function clock(seconds) {
  const at = new Date(1000 * seconds);
  const day = at.toDateString() === new Date().toDateString() ? "" : `${at.toLocaleDateString()} `;
  return day + at.toTimeString().slice(0, 8);
}

/** Join facts into a line that breaks between them alone. */
function line(facts) {
  return facts.filter((fact) => fact).map((fact) => fact.replaceAll(" ", "\u00a0")).join(" · ");
}

function listed(words) {
  return words.length < 2 ? words.join("") : `${words.slice(0, -1).join(", ")} and ${words.at(-1)}`;
}

// -- jobs ------------------------------------------------------------------------------------

/** Read ranks such as `0-3,7` as pairs of first and last. */
function ranges(text) {
  return text.split(",").map((part) => /^(\d+)(?:-(\d+))?$/.exec(part)).filter((match) => match)
    .map(([, first, last]) => [Number(first), Number(last ?? first)]);
}

function within(found, first, last) {
  return found.some(([low, high]) => low <= last && first <= high);
}

/** How much of the last seconds the others have waited for each rank, as one reducer sees it. */
function waits(reducer, job) {
  const shares = new Map();
  const [then, now] = [reducer.looks[0], reducer.looks.at(-1)];
  const seconds = now.uptime_s - then.uptime_s;
  if (seconds <= 0) {
    return shares;
  }
  const was = then.jobs.find((one) => one.name === job.name && one.generation === job.generation);
  const costliest = was?.costliest_ranks ?? []; // it began since, and had cost nothing
  const before = new Map(costliest.map((one) => [one.rank, one.late_s + one.slow_s]));
  for (const one of job.costliest_ranks) {
    // A rank that was not among the costliest had cost less than any of these, or nothing.
    const least = costliest.length < job.costliest_ranks.length ? 0 : Infinity;
    const waited = one.late_s + one.slow_s - (before.get(one.rank) ?? least);
    // Every thread waits for it, and they do so at the same time.
    shares.set(one.rank, Math.max(0, waited) / seconds / Math.max(1, now.lanes.length));
  }
  return shares;
}

/** What a job moves per second at one reducer: in the last seconds, or what it says of a minute. */
function jobRates(reducer, job) {
  const [then, now] = [reducer.looks[0], reducer.looks.at(-1)];
  const was = then.jobs.find((one) => one.name === job.name && one.generation === job.generation);
  const seconds = now.uptime_s - then.uptime_s;
  if (job.traffic && was?.traffic && seconds >= 1) {
    return MOVED.map((name) => Math.max(0, job.traffic[name] - was.traffic[name]) / seconds);
  }
  return job.lately?.seconds > 0 ? MOVED.map((name) => job.lately[name] / job.lately.seconds) : null;
}

/** Join what reducers say of the same jobs; those with something amiss come first. */
function jobsOf(those) {
  const live = those.filter((one) => one.status && !one.silent);
  const found = new Map();
  const tell = (reducer, isPast) => {
    for (const job of reducer.status.jobs) {
      const key = JSON.stringify([job.name, job.generation]);
      const known = found.get(key);
      if (known && known.isPast !== isPast) {
        continue; // those that answer know better
      }
      const its = known ?? { key, isPast, told: [], shares: new Map(), rates: [], strips: [] };
      its.told.push(job);
      its.rates.push(isPast ? null : jobRates(reducer, job));
      its.strips.push(...(reducer.history?.strips ?? []).filter((one) =>
        one.name === job.name && one.generation === job.generation));
      for (const [rank, share] of isPast ? [] : waits(reducer, job)) {
        its.shares.set(rank, Math.max(share, its.shares.get(rank) ?? 0));
      }
      found.set(key, its);
    }
  };
  live.forEach((one) => tell(one, false));
  those.filter((one) => one.status && one.silent).forEach((one) => tell(one, true));
  const all = [...found.values()].map(joined);
  const order = (a, b) => b.amiss - a.amiss || b.reserved - a.reserved || (a.key < b.key ? -1 : 1);
  return all.sort(order);
}

function joined(job) {
  const { told, shares } = job;
  const first = told.reduce((a, b) => (b.present < a.present ? b : a));
  const stragglers = told.map((one) => one.straggler).filter((one) => one);
  const votes = (one) =>
    stragglers.filter((it) => it.rank === one.rank && it.cause === one.cause).length;
  stragglers.sort((a, b) => votes(b) - votes(a) || b.share - a.share);
  const straggler = stragglers[0] ?? null;
  if (straggler) {
    shares.set(straggler.rank, Math.max(straggler.share, shares.get(straggler.rank) ?? 0));
  }
  const red = [...shares].filter(([rank, share]) => share >= LEVELS.at(-1) && rank !== straggler?.rank)
    .sort((a, b) => b[1] - a[1]);
  const absent = told.flatMap((one) => ranges(one.ranks_absent));
  const rates = job.rates.filter((one) => one);
  const lately = told.map((one) => one.lately).filter((one) => one);
  const isSlow = straggler !== null || red.length > 0;
  const amiss = job.isPast ? 0 : Number(isSlow) + 2 * Number(absent.length > 0);
  const sum = (name) => told.reduce((total, one) => total + one[name], 0);
  return {
    ...job,
    name: first.name,
    generation: first.generation,
    ranks: first.world_size,
    present: first.present,
    absentText: first.ranks_absent,
    presentRanges: ranges(first.ranks_present),
    absent,
    straggler,
    red,
    amiss,
    held: sum("held"),
    reserved: sum("reserved"),
    rounds: Math.max(...told.map((one) => one.rounds)),
    rates: rates.length && {
      in: rates.reduce((total, [bytes]) => total + bytes, 0),
      out: rates.reduce((total, [, bytes]) => total + bytes, 0),
      allReduces: Math.max(...rates.map(([, , number]) => number)), // every reducer has its part
    },
    medianS: Math.max(0, ...lately.map((one) => one.median_s)),
    p99S: Math.max(0, ...lately.map((one) => one.p99_s)),
    hosts: told.flatMap((one) => Object.entries(one.hosts ?? {}))
      .map(([host, said]) => [host, ranges(said)]),
    strips: joinedStrips(job.strips, first.world_size),
  };
}

/** Join strips that reducers have of the ranks of one job: the worst that one of them has seen. */
function joinedStrips(told, size) {
  const found = new Map();
  for (const one of told.flatMap((job) => job.ranks)) {
    const cells = one.cells.padStart(STRIP_CELLS);
    const known = found.get(one.rank) ?? { rank: one.rank, cells, waitedS: 0 };
    known.waitedS = Math.max(known.waitedS, one.waited_s);
    known.cells = [...known.cells].map((letter, at) =>
      (WORSE.indexOf(letter) > WORSE.indexOf(cells[at]) ? letter : cells[at])).join("");
    found.set(one.rank, known);
  }
  const strips = [...found.values()].filter((one) => one.cells.trim() && one.rank < size);
  strips.sort((a, b) => b.waitedS - a.waitedS);
  return strips.slice(0, MOST_STRIPS).sort((a, b) => a.rank - b.rank);
}

function hostOf(job, rank) {
  return (job.hosts.find(([, its]) => within(its, rank, rank)) ?? [""])[0];
}

function rankAt(job, rank) {
  const host = hostOf(job, rank);
  return host ? `rank ${rank} on ${host}` : `rank ${rank}`;
}

/** Return a duration in two digits, as a reducer's log has it. */
function about(seconds) {
  if (seconds < 0.001) {
    return "under 1 ms";
  }
  const [value, unit] = seconds < 0.0995 ? [1000 * seconds, "ms"] : [seconds, "s"];
  return `about ${value.toFixed(Number(value < 0.995) + Number(value < 9.95))} ${unit}`;
}

function stragglerSentence(job) {
  const { straggler } = job;
  const { rank, share, median_s: medianS } = straggler;
  const how = straggler.cause === "late"
    ? `its contributions come late, ${about(medianS)} each time`
    : `its link is slow, and its contributions take ${about(medianS)} longer`;
  const who = rankAt(job, rank).replace("rank", "Rank");
  return `${who} keeps the others waiting ${percent(share)} of the time: ${how}.`;
}

/** Say of ranks whose squares are red what is known, and no more: they may take turns by chance. */
function redSentence({ red, straggler }) {
  const [most, ...rest] = red.slice(0, 4).map(([rank, share]) => `rank ${rank} ${percent(share)}`);
  const who = rest.length ? `${[most, ...rest.slice(0, -1)].join(", ")} and ${rest.at(-1)}` : most;
  return `In the last ${WINDOW_S} s the others waited for ${who} of the time` +
    `${straggler ? "." : ", and it may be chance: no rank is named as the straggler."}`;
}

function absentSentence(job) {
  const several = !/^\d+$/.test(job.absentText);
  return `${several ? "Ranks" : "Rank"} ${job.absentText.replaceAll(",", ", ")} ` +
    `${several ? "are" : "is"} absent: not here yet, or gone.`;
}

/** Say what each square of a job shows. */
function cells(job) {
  const each = Math.ceil(job.ranks / MOST_CELLS);
  const found = [];
  for (let first = 0; first < job.ranks; first += each) {
    const last = Math.min(job.ranks, first + each) - 1;
    let share = 0;
    for (const [rank, its] of job.shares) {
      share = rank >= first && rank <= last ? Math.max(share, its) : share;
    }
    const isAbsent = within(job.absent, first, last) || !within(job.presentRanges, first, last);
    const straggler = job.straggler ? job.straggler.rank : -1;
    const isStraggler = first <= straggler && straggler <= last;
    const level = LEVELS.filter((least) => share >= least).length;
    const name = first === last ? rankAt(job, first) : `ranks ${first} to ${last}`;
    const waited = `waited for ${level === 0 ? "under 2 %" : percent(share)} of the time`;
    const of = isAbsent ? (first === last ? "absent" : "some absent") : waited;
    found.push({
      label: String(first),
      title: `${name}: ${of}${isStraggler ? ", the straggler" : ""}`,
      look: `cell level-${level}${isAbsent ? " absent" : ""}${isStraggler ? " straggler" : ""}`,
    });
  }
  return { each, found };
}

/** How fast a job is: what it moves per second, and how long its all-reduces take. */
function figures({ rates, medianS, p99S }) {
  if (!rates) {
    return null;
  }
  const bold = (text) => make("b", { text });
  return make("p", { look: "figures" }, [
    make("span", { look: "rate" }, ["in ", bold(`${size(rates.in)}/s`)]),
    make("span", { look: "rate out" }, ["out ", bold(`${size(rates.out)}/s`)]),
    make("span", {}, [bold(Number(rates.allReduces.toPrecision(3)).toLocaleString("en")),
      " all-reduces/s"]),
    medianS > 0 && make("span", { title: "From the first contribution to the result, in the " +
      "last minute: in the median, and the longest of all but one in a hundred" }, [
      "one takes ", bold(took(medianS)), ", 1 of 100 over ", bold(took(p99S)),
    ]),
  ]);
}

function took(seconds) {
  const [value, unit] = seconds < 9.95e-4 ? [1e6 * seconds, "µs"]
    : seconds < 0.995 ? [1e3 * seconds, "ms"] : [seconds, "s"];
  return `${Number(value.toPrecision(2))} ${unit}`;
}

const KINDS = { ".": "well", l: "late", L: "late much", s: "slow", S: "slow much", a: "absent" };

/** Draw what a rank did: runs of equal cells; the taller, the worse, and a line for an absent one. */
function stripOf(job, { rank, cells, waitedS }) {
  const heights = { well: 3, late: 12, slow: 8, absent: 1.5 };
  const known = cells.trim().length * SPAN_S / STRIP_CELLS;
  const share = Math.min(1, waitedS / known);
  const inCells = (letters) => [...cells].filter((one) => letters.includes(one)).length;
  const said = [["late", "lL"], ["slow", "sS"], ["absent", "a"]]
    .map(([kind, letters]) => [kind, inCells(letters)]).filter(([, number]) => number)
    .map(([kind, number]) => `${kind} in ${number}`);
  const label = `${rankAt(job, rank)}, ${count(cells.trim().length, "cell", "cells")} of 5 s: ` +
    `${said.length ? said.join(", ") : "neither late, slow nor absent"}; ` +
    `waited for ${percent(share)} of the time`;
  const svg = draw("svg", {
    class: "strip", viewBox: `0 0 ${STRIP_CELLS} 12`, preserveAspectRatio: "none", role: "img",
    "aria-label": label,
  });
  const title = draw("title", {});
  title.textContent = label;
  svg.append(title);
  for (const run of cells.matchAll(/([.lLsSa])\1*/g)) {
    const look = KINDS[run[1]];
    const height = heights[look.split(" ")[0]];
    const y = look === "absent" ? 6 - height / 2 : 12 - height;
    const place = { x: run.index, y, width: run[0].length, height };
    svg.append(draw("rect", { class: look, ...place }));
  }
  return [
    make("span", { look: "who", title: rankAt(job, rank) }, [
      `rank ${rank}`, hostOf(job, rank) && make("bdi", { text: hostOf(job, rank) }),
    ]),
    svg,
    make("span", { look: "share", text: share >= LEVELS[0] ? percent(share) : "" }),
  ];
}

function stripsOf(job) {
  if (!job.strips.length) {
    return null;
  }
  const rest = job.ranks - job.strips.length;
  return make("figure", { look: `strips${job.isPast ? " past" : ""}` }, [
    ...job.strips.flatMap((one) => stripOf(job, one)),
    make("div", { look: "axis" }, [ago(SPAN_S), job.isPast ? "last heard" : "now"]
      .map((text) => make("span", { text }))),
    rest > 0 && make("figcaption", {
      text: `The others waited for none of the ${count(rest, "other rank", "other ranks")} as long.`,
    }),
  ]);
}

/** Return when it was so many seconds ago, in words and by the clock. */
function ago(seconds) {
  return `${duration(seconds)} before, ${clock(Date.now() / 1000 - seconds).slice(-8, -3)}`;
}

function jobCard(job, following) {
  const { each, found } = cells(job);
  const costly = [...job.shares].filter(([, share]) => share >= LEVELS[0])
    .sort((a, b) => b[1] - a[1]).slice(0, 4)
    .map(([rank, share]) => `rank ${rank} ${percent(share)}`);
  const facts = [
    `${job.present.toLocaleString("en")} of ${count(job.ranks, "rank", "ranks")}`,
    following > 1 ? `at ${job.told.length} of ${following} reducers` : "",
    job.generation ? `generation ${job.generation}` : "",
    `${job.rounds ? count(job.rounds, "all-reduce", "all-reduces") : "no all-reduce"} in progress`,
    `${size(job.reserved)} reserved`,
  ];
  const name = make("h3", {}, [make("bdi", { text: job.name })]);
  return make("article", { look: "job" }, [
    name,
    make("p", { look: "facts", text: line(facts) }),
    figures(job),
    job.isPast && make("p", {
      look: "finding bad",
      text: "As last heard: no reducer that has it answers.",
    }),
    job.straggler && make("p", { look: "finding", text: stragglerSentence(job) }),
    job.red.length > 0 && make("p", { look: "finding", text: redSentence(job) }),
    job.absentText && make("p", { look: "finding bad", text: absentSentence(job) }),
    make("div", {
      look: `ranks${job.isPast ? " past" : ""}`,
      role: "img",
      "aria-label": `${count(job.ranks, "rank", "ranks")}, ` +
        `${costly.length ? `waited for: ${costly.join(", ")} of the time` : "none waited for"}`,
    }, found.map((cell) => make("span", { look: cell.look, title: cell.title, text: cell.label }))),
    each > 1 && make("p", { look: "quiet", text: `Each square stands for ${each} ranks.` }),
    costly.length > 0 && make("p", {
      look: "quiet",
      text: `Waited for in the last ${WINDOW_S} s, of the time: ${costly.join(", ")}.`,
    }),
    stripsOf(job),
  ]);
}

// -- reducers --------------------------------------------------------------------------------

/** The rates of the last ten minutes: age and bytes per second of each sample; null in a gap. */
function rates(reducer) {
  const { history, status } = reducer;
  if (!history || history.incarnation !== status.incarnation) {
    return [];
  }
  const now = { uptime_s: status.uptime_s, ...status.counters };
  const newest = history.samples.at(-1);
  const isNews = newest && now.uptime_s - newest.uptime_s > 1;
  const samples = isNews ? [...history.samples, now] : history.samples;
  const found = [];
  for (let at = 1; at < samples.length; at += 1) {
    const [a, b] = [samples[at - 1], samples[at]];
    const seconds = b.uptime_s - a.uptime_s;
    const age = status.uptime_s - b.uptime_s;
    if (age + seconds <= SPAN_S + GAP_S && seconds > 0) {
      const isKnown = seconds <= GAP_S;
      const rate = (name) => (isKnown ? Math.max(0, (b[name] - a[name]) / seconds) : null);
      found.push({ age, from: age + seconds, in: rate("bytes_in"), out: rate("bytes_out") });
    }
  }
  return found;
}

/** Return a round number that is not below this one. */
function ceiling(number) {
  const ten = 10 ** Math.floor(Math.log10(number));
  return [1, 1.5, 2, 3, 5, 7.5, 10].map((factor) => factor * ten).find((top) => top >= number);
}

function path(points, name, top) {
  let text = "";
  let amid = false;
  for (const point of points) {
    if (point.in === null) {
      amid = false;
      continue;
    }
    const x = (600 * (1 - point.age / SPAN_S)).toFixed(1);
    const y = (98 - 96 * point[name] / top).toFixed(1);
    text += amid ? `L${x} ${y}` : `M${(600 * (1 - point.from / SPAN_S)).toFixed(1)} ${y}L${x} ${y}`;
    amid = true;
  }
  return text;
}

function highest(points) {
  return Math.max(0, ...points.map((point) => Math.max(point.in, point.out)));
}

/** Draw the lines of a reducer; `top` is bytes per second, the same for all reducers. */
function chart(reducer, top) {
  const points = rates(reducer);
  const most = highest(points);
  if (most <= 0) {
    const text = points.length
      ? "Nothing has moved in the last ten minutes."
      : "Its rates are shown in a few seconds.";
    return make("figure", {}, [make("p", { look: "quiet nothing-moved", text })]);
  }
  const latest = reducer.looks;
  const seconds = latest.at(-1).uptime_s - latest[0].uptime_s;
  const rate = (name) => seconds > 0
    ? `${size(Math.max(0, latest.at(-1).counters[name] - latest[0].counters[name]) / seconds)}/s`
    : "…";
  const svg = draw("svg", {
    class: "chart",
    viewBox: "0 0 600 100",
    preserveAspectRatio: "none",
    role: "img",
    "aria-label": `Rates of the last ten minutes, at most ${size(most)}/s.`,
  });
  const inwards = path(points, "in", top);
  const area = inwards.split("M").filter((part) => part).map((part) => {
    const ends = part.split("L").map((point) => point.split(" ")[0]);
    return `M${ends[0]} 100L${part}L${ends.at(-1)} 100Z`;
  }).join("");
  svg.append(draw("path", { class: "area", d: area }), draw("path", { d: inwards }),
    draw("path", { class: "out", d: path(points, "out", top) }));
  return make("figure", {}, [
    make("figcaption", { look: "rates" }, [
      make("span", { look: "rate" }, ["in ", make("b", { text: rate("bytes_in") })]),
      make("span", { look: "rate out" }, ["out ", make("b", { text: rate("bytes_out") })]),
    ]),
    svg,
    make("div", { look: "axis" }, [
      ago(SPAN_S), `top: ${size(top)}/s`, reducer.silent ? "last heard" : "now",
    ].map((text) => make("span", { text }))),
  ]);
}

function memory({ limit, reserved, held }) {
  const part = (look, bytes) => {
    const span = make("span", { look });
    span.style.width = `${100 * Math.min(1, bytes / Math.max(1, limit))}%`;
    return bytes > 0 ? span : null;
  };
  return make("div", { look: "memory" }, [
    make("p", { look: "facts rates" }, [
      make("span", { look: "swatch" }, ["held ", make("b", { text: size(held) })]),
      make("span", { look: "swatch reserved" }, [
        "reserved ", make("b", { text: size(reserved) }), ` of ${size(limit)}`,
      ]),
    ]),
    make("div", { look: "bar", "aria-hidden": "true" }, [
      part("reserved", reserved),
      part("held", held),
    ]),
  ]);
}

function troubles(counters) {
  const named = [
    ["rounds_failed", "all-reduce failed", "all-reduces failed"],
    ["refused", "message refused", "messages refused"],
    ["dropped", "peer dropped", "peers dropped"],
    ["closed", "connection closed", "connections closed"],
  ];
  return named.filter(([name]) => counters[name] > 0)
    .map(([name, one, many]) => count(counters[name], one, many));
}

function reducerCard(reducer, topRate) {
  const { status, silent } = reducer;
  const state = silent ? "does not answer" : (status ? status.state : "asked");
  const look = silent ? "failing" : state;
  const top = make("div", { look: "title" }, [
    make("h3", {}, [make("bdi", { text: reducer.name })]),
    make("span", {
      look: `state ${["serving", "failing"].includes(look) ? look : ""}`,
      text: state,
    }),
  ]);
  if (!status) {
    const text = silent ? notHeard(reducer) : "No answer yet.";
    return make("article", {}, [top, make("p", { look: silent ? "finding bad" : "facts", text })]);
  }
  const hanging = status.lanes.filter((lane) => !lane.answers).map((lane) => `port ${lane.port}`);
  const bad = troubles(status.counters);
  const facts = [
    status.host ? `on ${status.host}` : "",
    `for workers ${status.address}`,
    count(status.lanes.length, "thread", "threads"),
    count(Math.max(0, ...status.lanes.map((lane) => lane.members)), "rank", "ranks"),
    silent ? "" : `up ${duration(status.uptime_s)}`,
    `version ${status.version}`,
  ];
  return make("article", {}, [
    top,
    make("p", { look: "facts", text: line(facts) }),
    silent && make("p", { look: "finding bad", text: notHeard(reducer) }),
    !silent && hanging.length > 0 && make("p", {
      look: "finding bad",
      text: `A serving thread does not answer: ${listed(hanging)}. The log may say why.`,
    }),
    make("div", { look: silent ? "past" : "" }, [
      chart(reducer, topRate),
      memory(status.memory),
    ]),
    bad.length > 0 && make("p", { look: "quiet", text: `Since it started: ${listed(bad)}.` }),
  ]);
}

function notHeard(reducer) {
  const why = `It ${reducer.failed || "does not answer"}.`;
  if (!reducer.heardMs) {
    return `${why} It was not heard since this page was opened: does it run, with an HTTP port ` +
      "here, and can this browser reach it?";
  }
  return `${why} Last heard ${duration((performance.now() - reducer.heardMs) / 1000)} ago.`;
}

// -- events ----------------------------------------------------------------------------------

/** All events, the latest first; what several threads or reducers say at once is one. */
function eventsOf(those) {
  const all = those.flatMap((one) => (one.history ? one.history.events : [])
    .map((event) => ({ ...event, from: one.name })));
  all.reverse().sort((a, b) => b.at - a.at);
  const found = [];
  for (const event of all) {
    const text = event.text.replace(MEASURED, "");
    const same = found.slice(-32).find((one) =>
      one.text.replace(MEASURED, "") === text && one.at - event.at < SAME_EVENT_S);
    if (same) {
      same.from.add(event.from);
    } else {
      found.push({ ...event, from: new Set([event.from]) });
    }
  }
  return found;
}

function eventRow(event, following) {
  const datetime = new Date(1000 * event.at).toISOString();
  const kind = event.level === "info" ? "job" : event.level;
  const from = event.from.size === following ? "all reducers" : listed([...event.from]);
  return make("li", { look: "event" }, [
    make("time", { text: clock(event.at), datetime }),
    make("span", { look: `kind ${["warning", "error"].includes(kind) ? kind : ""}`, text: kind }),
    make("span", { look: "text", text: event.text }),
    following > 1 && make("span", { look: "where", text: from }),
  ]);
}

// -- the page --------------------------------------------------------------------------------

function make(tag, { look, text, ...others }, children = []) {
  const node = document.createElement(tag);
  if (look) {
    node.className = look;
  }
  if (text !== undefined) {
    node.textContent = text;
  }
  for (const [name, value] of Object.entries(others)) {
    node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child));
  return node;
}

function draw(tag, attributes) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) {
    node.setAttribute(name, value);
  }
  return node;
}

/** Put children into a node; those that look as before stay, with what is selected in them. */
function put(node, children) {
  children.forEach((child, at) => {
    const old = node.childNodes[at];
    if (!old) {
      node.append(child);
    } else if (!old.isEqualNode(child)) {
      old.replaceWith(child);
    }
  });
  while (node.childNodes.length > children.length) {
    node.lastChild.remove();
  }
}

function say(node, text) {
  if (node.textContent !== text) {
    node.textContent = text;
  }
}

function part(id) {
  return document.getElementById(id);
}

function showJobs(those, jobs) {
  const told = those.map((one) => one.status).filter((status) => status);
  const servers = told.map((status) => status.address).join(",");
  const empty = told.length
    ? ["No job is here. Workers come with ", make("code", { text: `REDUCTION_SERVERS=${servers}` })]
    : ["No reducer has told of its jobs yet."];
  const card = (job) => jobCard(job, those.length);
  const [shown, rest] = [jobs.slice(0, SHOWN_JOBS), jobs.slice(SHOWN_JOBS)];
  put(part("jobs"), shown.length ? shown.map(card) : [make("p", { look: "empty" }, empty)]);
  part("legend").hidden = jobs.length === 0;
  part("strip-legend").hidden = !jobs.some((job) => job.strips.length);
  const more = part("more-jobs");
  more.hidden = rest.length === 0;
  say(more.querySelector("summary"), count(rest.length, "more job", "more jobs"));
  // Squares of many jobs are thousands: they are made for who wants to see them.
  put(more.querySelector("div"), more.open ? rest.map(card) : []);
  const untold = Math.max(0, ...told.map((status) => status.jobs_total - status.jobs.length));
  const text = `A reducer has ${count(untold, "further job", "further jobs")}, with less memory.`;
  part("untold-jobs").hidden = untold === 0;
  say(part("untold-jobs"), text);
}

function showEvents(those) {
  const events = eventsOf(those);
  const rows = events.map((event) => eventRow(event, those.length));
  const [list, more, none] = [part("events"), part("more-events"), part("no-events")];
  none.hidden = rows.length > 0;
  say(none, those.some((one) => one.history)
    ? "Nothing has happened: no job has come or gone, and nothing has failed."
    : "No reducer has told of its past yet.");
  list.hidden = rows.length === 0;
  put(list, rows.slice(0, SHOWN_EVENTS));
  more.hidden = rows.length <= SHOWN_EVENTS;
  const rest = rows.slice(SHOWN_EVENTS);
  say(more.querySelector("summary"), count(rest.length, "earlier event", "earlier events"));
  put(more.querySelector("ol"), rest);
}

function summary(those, jobs) {
  const silent = those.filter((one) => one.silent);
  const heard = those.filter((one) => one.status && !one.silent);
  const wrong = heard.filter((one) => one.status.state !== "serving");
  const live = jobs.filter((job) => !job.isPast);
  const late = live.filter((job) => job.straggler || job.red.length);
  const lacking = live.filter((job) => job.absentText);
  if (!heard.length && !silent.length) {
    return "Asking the reducers…";
  }
  const said = [];
  if (silent.length) {
    const verb = silent.length === 1 ? "does" : "do";
    said.push(those.length === 1
      ? "The reducer does not answer."
      : `${silent.length} of ${those.length} reducers ${verb} not answer.`);
  }
  said.push(...wrong.map((one) => `${one.name} is ${one.status.state}.`));
  if (heard.length) {
    const ranks = live.reduce((sum, job) => sum + job.present, 0);
    const who = heard.length === 1 ? "One reducer serves" : `${heard.length} reducers serve`;
    said.push(live.length
      ? `${who} ${count(live.length, "job", "jobs")} with ${count(ranks, "rank", "ranks")}.`
      : `${who}, and ${heard.length === 1 ? "waits" : "wait"} for jobs.`);
  }
  said.push(...lacking.slice(0, 2).map((job) => `Job ${job.name} lacks ranks.`));
  said.push(...late.slice(0, 2).map((job) => (job.straggler
    ? `Job ${job.name} waits for rank ${job.straggler.rank}.`
    : `Job ${job.name} waited for rank ${job.red[0][0]} for ${percent(job.red[0][1])} of the time.`)));
  return said.join(" ");
}

function show() {
  const those = distinct();
  const jobs = jobsOf(those);
  const text = summary(those, jobs);
  say(part("summary"), text);
  const amiss = those.some((one) => one.silent) || jobs.some((job) => job.amiss);
  document.title = amiss ? "! Reducers" : "Reducers";
  showJobs(those, jobs);
  const highestRate = Math.max(1, ...those.map((one) => highest(one.status ? rates(one) : [])));
  const top = ceiling(highestRate);
  put(part("reducers"), those.map((one) => reducerCard(one, top)));
  showEvents(those);
}

part("more-jobs").addEventListener("toggle", show);
setInterval(show, 250); // what is not heard is told without an answer
reducers.forEach((one) => one.follow());
