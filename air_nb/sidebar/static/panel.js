/**
 * The panel: GPUs, runs, checkpoints. One module without dependencies, used by the labextension (right sidebar) and as
 * an anywidget (below a cell). It draws what the kernel's messages say (air_nb/sidebar/messages.py), no more.
 *
 * Names of runs, lines of logs and labels of processes are anybody's text: they go into text nodes and attributes only,
 * never into HTML. Updates change the nodes that are there, so that focus, scrolling and what is unfolded stay.
 */

const SERIES = ['utilization_percent', 'memory_percent', 'temperature_celsius', 'power_watts'];
const HOST_SERIES = ['cpu_percent', 'memory_percent'];
const INTERVALS_S = [1, 2, 5, 10, 30, 60, 120, 300, 600];
const MOST_CARDS = 8; // more GPUs are shown as one line each
const HOT_CELSIUS = 85;
const FULL_PERCENT = 95;
const LOG_LINES = 5000;
const LOG_LINE_CHARS = 4000;
const LOG_AGAIN_MS = 1000;
const LOG_LOST_MS = 15000;
const RESYNC_AGAIN_MS = 5000;
const GIB = 2 ** 30;

// ------------------------------------------------------------------------------------------------- values as text

const isNumber = value => typeof value === 'number' && Number.isFinite(value);
const orUnknown = (value, format) => (isNumber(value) ? format(value) : 'n/a');
const grouped = (value, digits) =>
  value.toLocaleString('en', { minimumFractionDigits: digits, maximumFractionDigits: digits });

const percent = value => orUnknown(value, v => `${Math.round(v)} %`);
const celsius = value => orUnknown(value, v => `${Math.round(v)} °C`);
const watts = value => orUnknown(value, v => `${Math.round(v)} W`);
const mebibytes = value => orUnknown(value, v => `${grouped(v / 2 ** 20, 0)} MiB`);
const partOf = (used, total) => (isNumber(used) && total > 0 ? (100 * used) / total : null);

/** Such as "61.3 / 80 GiB": an unknown part is "n/a", an unknown whole is left out. */
function gibibytes(used, total, digits = 1) {
  const part = isNumber(used) ? grouped(used / GIB, used < 100 * GIB ? digits : 0) : 'n/a';
  const whole = isNumber(total) ? ` / ${grouped(total / GIB, total < 20 * GIB ? digits : 0)}` : '';
  return isNumber(used) || whole ? `${part}${whole} GiB` : 'n/a';
}

/** Such as "412 / 700 W". */
function wattsOfLimit(drawn, limit) {
  return isNumber(limit) ? `${isNumber(drawn) ? Math.round(drawn) : 'n/a'} / ${Math.round(limit)} W` : watts(drawn);
}

function size(bytes) {
  const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB'];
  const power = bytes >= 1 ? Math.min(Math.floor(Math.log2(bytes) / 10), units.length - 1) : 0;
  return `${grouped(bytes / 1024 ** power, power ? 1 : 0)} ${units[power]}`;
}

/** Such as "1:02:03". */
function duration(seconds) {
  const whole = Math.max(0, Math.floor(seconds));
  const [h, m, s] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  const two = number => String(number).padStart(2, '0');
  return h ? `${h}:${two(m)}:${two(s)}` : `${m}:${two(s)}`;
}

/** Such as "5 min". */
function age(seconds) {
  const steps = [
    [86400, 'd'],
    [3600, 'h'],
    [60, 'min'],
  ];
  const [unit, name] = steps.find(([length]) => seconds >= 1.5 * length) ?? [1, 's'];
  return `${Math.max(0, Math.round(seconds / unit))} ${name}`;
}

const time = seconds => new Date(seconds * 1000).toLocaleTimeString('en-GB');
const fullTime = seconds => (isNumber(seconds) ? new Date(seconds * 1000).toLocaleString() : '');
const plural = (count, noun) => `${count.toLocaleString('en')} ${noun}${count === 1 ? '' : 's'}`;

/** A path as a shell and IPython's magics read it. */
const quoted = path => (/^[\w@%+=:,./-]+$/.test(path) ? path : `'${path.replaceAll("'", `'"'"'`)}'`);

/** Only what opens a page: a link's address comes from outside too. */
function safeHref(href) {
  try {
    const url = new URL(href, document.baseURI);
    return ['http:', 'https:'].includes(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

// --------------------------------------------------------------------------------------------------------- the DOM

/**
 * Make an element.
 * @param {string} tag
 * @param {object} [options] attributes; `text` is its text, `on` its listeners by event
 * @param {...(Node|string)} children
 */
function make(tag, { text, on = {}, ...attributes } = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) setAttribute(node, name, value);
  for (const [event, listener] of Object.entries(on)) node.addEventListener(event, listener);
  if (text !== undefined) node.textContent = text;
  node.append(...children);
  return node;
}

/** Set or, for null, remove; nothing is touched that stays the same, so that screen readers are left alone. */
function setAttribute(node, name, value) {
  if (value === null || value === undefined || value === false) node.removeAttribute(name);
  else if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value === true ? '' : value);
}

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Text that may be cut: the whole is in the tooltip. */
function setCut(node, text, title = text) {
  setText(node, text);
  setAttribute(node, 'title', title || null);
}

function setTone(node, tone) {
  for (const each of ['good', 'live', 'warn', 'bad']) node.classList.toggle(`air-${each}`, each === tone);
}

/** Children with a key each: made, updated, put in order, removed. The focus stays with the row that has it. */
class KeyedList {
  constructor(parent, create) {
    this.parent = parent;
    this.create = create;
    this.rows = new Map();
  }

  update(items, keyOf) {
    const before = this.rows;
    this.rows = new Map();
    for (const item of items) {
      const key = keyOf(item);
      if (this.rows.has(key)) continue;
      const row = before.get(key) ?? this.create(item);
      row.update(item);
      this.rows.set(key, row);
    }
    const focused = this.parent.getRootNode().activeElement;
    const hadFocus = focused && this.parent.contains(focused);
    for (const [key, row] of before) if (!this.rows.has(key)) this.#remove(row);
    this.#order();
    if (hadFocus) this.#restoreFocus(focused);
  }

  clear() {
    this.update([], () => '');
  }

  #remove(row) {
    row.close?.();
    row.node.remove();
  }

  #order() {
    let place = this.parent.firstChild;
    for (const { node } of this.rows.values()) {
      if (node === place) place = place.nextSibling;
      else this.parent.insertBefore(node, place);
    }
  }

  #restoreFocus(focused) {
    if (this.parent.getRootNode().activeElement === focused) return;
    const heir = focused.isConnected ? focused : this.parent.closest('details')?.querySelector('summary');
    heir?.focus({ preventScroll: true });
  }
}

/** A button that may ask back first, and shows that its request is on the way until there is an answer. */
class Action {
  /**
   * The owner places `button` and, where there is a question, `confirm`.
   * @param {{label: string, busy?: string, question?: function, danger?: boolean, run: function}} options
   *   `question` gives the text to ask, `run` a promise of the end
   */
  constructor(options) {
    this.options = options;
    this.isBusy = false;
    this.button = make('button', { type: 'button', text: options.label, on: { click: () => this.#press() } });
    this.confirm = make('span', { class: 'air-confirm', role: 'group', hidden: true });
    this.confirm.addEventListener('keydown', event => event.key === 'Escape' && this.#dismiss(event));
  }

  /** @param {{subject: string, isShown?: boolean, why?: string}} state `why` says why it can't be pressed */
  update({ subject, isShown = true, why = '' }) {
    this.subject = subject;
    this.why = why;
    if (!isShown && !this.confirm.hidden) this.confirm.hidden = true;
    this.button.hidden = !isShown || !this.confirm.hidden;
    this.#draw();
  }

  /** The request goes on elsewhere: shown as busy although nobody pressed this button. */
  setBusy(isBusy) {
    this.isBusyElsewhere = isBusy;
    this.#draw();
  }

  #draw() {
    const isBusy = this.isBusy || this.isBusyElsewhere;
    const text = isBusy ? (this.options.busy ?? this.options.label) : this.options.label;
    setText(this.button, text);
    setAttribute(this.button, 'aria-label', `${text} ${this.subject}`);
    // Not `disabled`: a button that loses the focus while it is busy throws keyboard users to the page's top.
    setAttribute(this.button, 'aria-disabled', isBusy || this.why ? 'true' : null);
    setAttribute(this.button, 'title', this.why || null);
  }

  #press() {
    if (this.isBusy || this.isBusyElsewhere || this.why) return;
    if (this.options.question) this.#ask();
    else this.#run();
  }

  #ask() {
    const question = this.options.question();
    const kind = this.options.danger ? 'air-danger' : null;
    const yes = make('button', {
      type: 'button',
      class: kind,
      text: this.options.label,
      on: { click: () => this.#run() },
    });
    const no = make('button', { type: 'button', text: 'Cancel', on: { click: event => this.#dismiss(event) } });
    setAttribute(yes, 'aria-label', `${this.options.label} ${this.subject}, really`);
    setAttribute(this.confirm, 'aria-label', question);
    this.confirm.replaceChildren(make('span', { text: question }), yes, no);
    this.confirm.hidden = false;
    this.button.hidden = true;
    yes.focus();
  }

  #dismiss(event) {
    event?.stopPropagation();
    this.confirm.hidden = true;
    this.button.hidden = false;
    this.button.focus({ preventScroll: true });
  }

  async #run() {
    this.isBusy = true;
    if (!this.confirm.hidden) this.#dismiss();
    this.#draw();
    await this.options.run();
    this.isBusy = false;
    this.#draw();
  }
}

// ------------------------------------------------------------------------------------------------------ the history

function decode(base64, Type) {
  const bytes = Uint8Array.from(atob(base64), character => character.charCodeAt(0));
  return Array.from(new Type(bytes.buffer));
}

/** Columns of equal length over a column of times; NaN is unknown. */
class History {
  constructor(limit) {
    this.limit = limit;
    this.times = [];
    this.columns = new Map();
  }

  load(message) {
    this.times = decode(message.at, Float64Array);
    this.columns.clear();
    for (const gpu of message.gpus) {
      for (const name of SERIES) this.#set(`${gpu.uuid}/${name}`, gpu[name]);
    }
    for (const name of HOST_SERIES) this.#set(`host/${name}`, message.host[name]);
  }

  #set(name, base64) {
    const values = base64 ? decode(base64, Float32Array) : [];
    values.length = this.times.length;
    this.columns.set(
      name,
      Array.from(values, value => value ?? NaN),
    );
  }

  /** @param {number} at @param {Map<string, ?number>} values by column; one that is new was unknown before */
  append(at, values) {
    if (at <= (this.times.at(-1) ?? -Infinity)) return;
    const length = this.times.push(at);
    for (const name of values.keys()) {
      if (!this.columns.has(name)) this.columns.set(name, new Array(length - 1).fill(NaN));
    }
    for (const [name, column] of this.columns) column.push(values.get(name) ?? NaN);
    const surplus = length - this.limit;
    if (surplus > 0) for (const column of [this.times, ...this.columns.values()]) column.splice(0, surplus);
  }

  /** Whether nothing is known of the time before a point: no sample came for much longer than usual there. */
  isGap(index, interval_s) {
    const between = (from, to) => (from < 0 || to >= this.times.length ? Infinity : this.times[to] - this.times[from]);
    // Neighbours, because the interval may have been longer when those points were taken.
    const usual = Math.min(between(index - 2, index - 1), between(index, index + 1));
    return between(index - 1, index) > 3 * Math.max(interval_s, Number.isFinite(usual) ? usual : 0);
  }

  /** Index of the point next to a time; -1 if there is none. */
  nearest(at) {
    let best = -1;
    this.times.forEach((each, index) => {
      if (best < 0 || Math.abs(each - at) < Math.abs(this.times[best] - at)) best = index;
    });
    return best;
  }
}

/** One line over the last hours. A slider to keyboards and screen readers: the arrows go through its points. */
class Chart {
  /**
   * @param {Panel} panel
   * @param {{label: string, column: string, tone: string, format: function, top: function}} options
   *   `top` gives the value of the upper edge
   */
  constructor(panel, options) {
    this.panel = panel;
    this.options = options;
    this.marked = null; // time of the point that is shown
    this.node = make('canvas', {
      class: `air-tone-${options.tone}`,
      role: 'slider',
      tabindex: -1,
      'aria-orientation': 'horizontal',
      'aria-valuemin': 0,
      on: {
        pointermove: event => this.#point(event.offsetX),
        pointerleave: () => this.#mark(null),
        focus: () => this.#mark(this.panel.history.times.at(-1) ?? null),
        blur: () => this.#mark(null),
        keydown: event => this.#key(event),
      },
    });
    panel.charts.add(this);
  }

  close() {
    this.panel.charts.delete(this);
  }

  get values() {
    return this.panel.history.columns.get(this.options.column) ?? [];
  }

  #range() {
    const end = this.panel.history.times.at(-1) ?? 0;
    return [end - this.panel.hello.window_s, end];
  }

  #point(x) {
    const [start, end] = this.#range();
    const index = this.panel.history.nearest(start + (x / this.node.clientWidth) * (end - start));
    this.#mark(index < 0 ? null : this.panel.history.times[index]);
  }

  #mark(at) {
    this.marked = at;
    this.draw();
    this.#tell();
  }

  #key(event) {
    const { times } = this.panel.history;
    const here = this.panel.history.nearest(this.marked ?? Infinity);
    const steps = {
      ArrowLeft: here - 1,
      ArrowRight: here + 1,
      PageUp: here - 30,
      PageDown: here + 30,
      Home: 0,
      End: times.length - 1,
    };
    if (event.key in steps && times.length) {
      this.#mark(times[Math.min(Math.max(steps[event.key], 0), times.length - 1)]);
      event.preventDefault();
    }
    if (event.key === 'Escape') this.#mark(null);
  }

  #describe(index) {
    return `${this.options.format(this.values[index])} at ${time(this.panel.history.times[index])}`;
  }

  #tell() {
    if (this.marked === null) return this.panel.tip.hide(this);
    const index = this.panel.history.nearest(this.marked);
    this.panel.tip.show(this, this.#describe(index), this.#x(index));
  }

  #x(index) {
    const [start, end] = this.#range();
    return ((this.panel.history.times[index] - start) / (end - start)) * this.node.clientWidth;
  }

  #speak() {
    const { times } = this.panel.history;
    const index = this.marked === null ? times.length - 1 : this.panel.history.nearest(this.marked);
    setAttribute(this.node, 'aria-label', `${this.options.label}, history`);
    setAttribute(this.node, 'aria-valuemax', Math.max(times.length - 1, 0));
    setAttribute(this.node, 'aria-valuenow', Math.max(index, 0));
    setAttribute(this.node, 'aria-valuetext', index < 0 ? 'no values yet' : this.#describe(index));
  }

  draw() {
    this.#speak();
    const { clientWidth: width, clientHeight: height } = this.node;
    if (!width) return;
    const scale = window.devicePixelRatio || 1;
    const pixels = [Math.round(width * scale), Math.round(height * scale)];
    if (this.node.width !== pixels[0] || this.node.height !== pixels[1]) [this.node.width, this.node.height] = pixels;
    const pen = this.node.getContext('2d');
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.strokeStyle = pen.fillStyle = getComputedStyle(this.node).color;
    this.#drawFrame(pen, width, height);
    this.#drawLine(pen, width, height);
    this.#drawMark(pen, height);
  }

  #drawFrame(pen, width, height) {
    pen.globalAlpha = 0.25;
    pen.lineWidth = 1;
    pen.beginPath();
    for (const y of [0.5, height - 0.5]) {
      pen.moveTo(0, y);
      pen.lineTo(width, y);
    }
    pen.stroke();
    pen.globalAlpha = 1;
  }

  #y(value, height) {
    const part = Math.min(Math.max(value / this.options.top(), 0), 1);
    return height - 1.5 - part * (height - 3);
  }

  /** Unbroken pieces: a list of points each, ended by an unknown value or a time without samples. */
  #pieces(height) {
    const { history, interval_s } = this.panel;
    const { values } = this;
    const [start] = this.#range();
    const pieces = [];
    let piece = null;
    history.times.forEach((at, index) => {
      if (at < start || Number.isNaN(values[index] ?? NaN)) return void (piece = null);
      if (!piece || history.isGap(index, interval_s)) pieces.push((piece = []));
      piece.push([this.#x(index), this.#y(values[index], height)]);
    });
    return pieces;
  }

  #drawLine(pen, width, height) {
    pen.lineWidth = 1.25;
    pen.lineJoin = 'round';
    for (const piece of this.#pieces(height)) {
      const [first, last] = [piece[0], piece.at(-1)];
      if (last[0] - first[0] < 1) pen.fillRect(Math.min(first[0], width - 2), first[1] - 1, 2, 2);
      pen.beginPath();
      for (const [x, y] of piece) pen.lineTo(x, y);
      pen.stroke();
      pen.lineTo(last[0], height);
      pen.lineTo(first[0], height);
      pen.globalAlpha = 0.15;
      pen.fill();
      pen.globalAlpha = 1;
    }
  }

  #drawMark(pen, height) {
    if (this.marked === null) return;
    const index = this.panel.history.nearest(this.marked);
    if (index < 0) return;
    const x = this.#x(index);
    pen.globalAlpha = 0.6;
    pen.fillRect(x - 0.5, 0, 1, height);
    pen.globalAlpha = 1;
    if (Number.isNaN(this.values[index] ?? NaN)) return;
    pen.beginPath();
    pen.arc(x, this.#y(this.values[index], height), 2.5, 0, 2 * Math.PI);
    pen.fill();
  }
}

/** The one tooltip of all charts. */
class Tip {
  constructor(root) {
    this.root = root;
    this.owner = null;
    this.node = make('div', { class: 'air-tip', 'aria-hidden': 'true', hidden: true });
  }

  show(chart, text, x) {
    this.owner = chart;
    this.node.hidden = false;
    setText(this.node, text);
    const [root, canvas] = [this.root.getBoundingClientRect(), chart.node.getBoundingClientRect()];
    const rightmost = this.root.clientWidth - this.node.offsetWidth - 2;
    const left = canvas.left - root.left + x - this.node.offsetWidth / 2;
    this.node.style.left = `${Math.max(2, Math.min(left, rightmost))}px`;
    this.node.style.top = `${canvas.top - root.top - this.node.offsetHeight - 2}px`;
  }

  hide(chart) {
    if (this.owner === chart) this.node.hidden = true;
  }
}

// ------------------------------------------------------------------------------------------------------ GPUs, host

/** Name, value and chart of one quantity. */
class Metric {
  constructor(panel, { name, ...chart }) {
    this.value = make('span');
    this.chart = chart.column ? new Chart(panel, { ...chart, label: `${chart.subject} ${name}` }) : null;
    const heading = make('div', {}, make('span', { class: 'air-muted', text: name }), this.value);
    this.node = make('div', { class: 'air-metric' }, heading);
    if (this.chart) this.node.append(this.chart.node);
  }

  update(text, title = null) {
    setText(this.value, text);
    setAttribute(this.value, 'title', title);
  }

  close() {
    this.chart?.close();
  }
}

/** Metrics side by side. Tab reaches one chart of them, the arrows up and down the others. */
class Metrics {
  constructor(metrics) {
    this.metrics = metrics;
    this.charts = metrics.filter(metric => metric.chart).map(metric => metric.chart.node);
    this.charts[0].tabIndex = 0;
    this.node = make('div', { class: 'air-metrics', on: { keydown: event => this.#key(event) } });
    this.node.append(...metrics.map(metric => metric.node));
  }

  #key(event) {
    const step = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    const to = this.charts[this.charts.indexOf(event.target) + step];
    if (!step || !this.charts.includes(event.target)) return;
    event.preventDefault();
    if (!to) return;
    event.target.tabIndex = -1;
    to.tabIndex = 0;
    to.focus();
  }

  close() {
    for (const metric of this.metrics) metric.close();
  }
}

/** What the page knows of a GPU, from three messages. */
function describeGpu(device, now, processes) {
  const total = device.memory_total_bytes;
  const gpu = { ...device, ...now, total, processes, part: partOf(now?.memory_used_bytes, total) };
  gpu.limit = device.power_limit_watts;
  gpu.title = `GPU ${device.index}`;
  gpu.isBroken = now?.state === 'lost' || now?.state === 'error';
  [gpu.badge, gpu.tone] = gpuBadge(gpu, now);
  gpu.memory = gibibytes(now?.memory_used_bytes, total);
  gpu.memoryInShort = gibibytes(now?.memory_used_bytes, total, 0).replaceAll(' / ', '/');
  return gpu;
}

function gpuBadge(gpu, now) {
  if (!now) return ['No values yet', ''];
  if (now.state === 'lost') return ['Lost', 'bad'];
  if (now.state !== 'ok') return ['Error', 'bad'];
  const isHot = now.temperature_celsius >= HOT_CELSIUS;
  const isFull = gpu.part !== null && gpu.part >= FULL_PERCENT;
  if (isHot || isFull) return [[isHot && 'Hot', isFull && 'Memory full'].filter(Boolean).join(', '), 'warn'];
  return ['OK', 'good'];
}

/** Charts of a GPU and who holds its memory. */
class GpuBody {
  constructor(panel, gpu) {
    this.panel = panel;
    const shared = { subject: gpu.title };
    const column = name => `${gpu.uuid}/${name}`;
    this.limit = null;
    this.utilization = new Metric(panel, {
      ...shared,
      name: 'Utilisation',
      column: column(SERIES[0]),
      tone: 'blue',
      format: percent,
      top: () => 100,
    });
    this.memory = new Metric(panel, {
      ...shared,
      name: 'Memory',
      column: column(SERIES[1]),
      tone: 'orange',
      format: percent,
      top: () => 100,
    });
    this.temperature = new Metric(panel, {
      ...shared,
      name: 'Temp.',
      column: column(SERIES[2]),
      tone: 'green',
      format: celsius,
      top: () => 100,
    });
    this.power = new Metric(panel, {
      ...shared,
      name: 'Power',
      column: column(SERIES[3]),
      tone: 'purple',
      format: watts,
      top: () => this.#topWatts(),
    });
    this.metrics = new Metrics([this.utilization, this.memory, this.temperature, this.power]);
    this.problem = make('p', { class: 'air-problem', hidden: true });
    this.holders = make('ul', { class: 'air-holders', 'aria-label': `Processes on ${gpu.title}` });
    this.holderRows = new KeyedList(this.holders, () => new Holder());
    this.node = make('div', { class: 'air-body' }, this.problem, this.metrics.node, this.holders);
  }

  /** The limit or, where the driver tells none, the highest value seen. */
  #topWatts() {
    if (this.limit > 0) return this.limit;
    return this.power.chart.values.reduce((most, value) => (value > most ? value : most), 1);
  }

  update(gpu) {
    this.limit = gpu.limit;
    this.problem.hidden = !gpu.isBroken;
    setText(this.problem, gpu.isBroken ? gpu.reason || 'The driver gives no reason.' : '');
    this.utilization.update(percent(gpu.utilization_percent));
    this.memory.update(gpu.memory, gpu.part === null ? null : percent(gpu.part));
    this.temperature.update(celsius(gpu.temperature_celsius));
    this.power.update(wattsOfLimit(gpu.power_watts, gpu.limit));
    this.holders.hidden = !gpu.processes?.length;
    this.holderRows.update(gpu.processes ?? [], each => `${each.pid} ${each.label}`);
  }

  close() {
    this.metrics.close();
  }
}

/** A process that holds memory. */
class Holder {
  constructor() {
    this.label = make('span', { class: 'air-cut' });
    this.used = make('span', { class: 'air-muted' });
    this.node = make('li', {}, this.label, this.used);
  }

  update(process) {
    const label = process.label || `process ${process.pid}`;
    setCut(this.label, label, `${label} (pid ${process.pid})`);
    setAttribute(this.node, 'aria-label', label);
    setText(this.used, mebibytes(process.used_bytes));
  }
}

/** A GPU as a card. */
class GpuCard {
  constructor(panel, gpu) {
    this.name = make('span', { class: 'air-cut air-muted' });
    this.mig = make('span', { class: 'air-badge', text: 'MIG', title: 'Split into MIG devices' });
    this.badge = make('span', { class: 'air-badge' });
    this.body = new GpuBody(panel, gpu);
    const head = make('div', { class: 'air-head' }, make('b', { text: gpu.title }), this.name, this.mig, this.badge);
    this.node = make('li', { class: 'air-card' }, head, this.body.node);
  }

  update(gpu) {
    setAttribute(this.node, 'aria-label', `${gpu.title}: ${gpu.badge}`);
    setTone(this.node, gpu.tone === 'good' ? '' : gpu.tone);
    setCut(this.name, gpu.name ?? 'unknown model', `${gpu.name ?? 'unknown model'}\n${gpu.uuid}`);
    this.mig.hidden = !gpu.mig;
    setText(this.badge, gpu.badge);
    setTone(this.badge, gpu.tone);
    this.body.update(gpu);
  }

  close() {
    this.body.close();
  }
}

/** A GPU as one line that unfolds to what a card has. */
class GpuRow {
  constructor(panel, gpu) {
    this.panel = panel;
    this.body = null;
    this.index = make('b', { text: String(gpu.index) });
    this.utilization = make('span', { class: 'air-meter air-tone-blue' }, make('span'));
    this.memory = make(
      'span',
      { class: 'air-meter air-tone-orange' },
      make('span', { class: 'air-wide' }),
      make('span', { class: 'air-narrow' }),
    );
    this.temperature = make('span', { class: 'air-right' });
    this.power = make('span', { class: 'air-wide air-right' });
    this.badge = make('span', { class: 'air-badge' });
    this.holder = make('span', { class: 'air-wide air-cut air-muted' });
    this.tail = make('span', { class: 'air-tail' }, this.badge, this.holder);
    const cells = [this.index, this.utilization, this.memory, this.temperature, this.power, this.tail];
    this.summary = make('summary', {}, ...cells);
    this.details = make('details', { on: { toggle: () => this.#toggle() } }, this.summary);
    this.node = make('li', { class: 'air-gpu-row' }, this.details);
  }

  update(gpu) {
    this.gpu = gpu;
    setAttribute(this.node, 'aria-label', `${gpu.title}: ${gpu.badge}`);
    setAttribute(this.summary, 'title', `${gpu.title} · ${gpu.name ?? 'unknown model'}`);
    const { utilization_percent: utilization } = gpu;
    this.#meter(this.utilization, percent(utilization), utilization, `${gpu.title} utilisation`);
    this.#meter(this.memory, gpu.memory, gpu.part, 'memory');
    setText(this.memory.lastChild, gpu.memoryInShort);
    setText(this.temperature, celsius(gpu.temperature_celsius));
    setText(this.power, watts(gpu.power_watts));
    this.badge.hidden = gpu.tone === 'good' && !gpu.mig;
    setText(this.badge, gpu.mig ? (gpu.tone === 'good' ? 'MIG' : `${gpu.badge}, MIG`) : gpu.badge);
    setTone(this.badge, gpu.tone === 'good' ? '' : gpu.tone);
    this.tail.classList.toggle('air-quiet', this.badge.hidden); // nothing to say on a line of its own
    setCut(this.holder, gpu.processes?.map(each => each.label || `process ${each.pid}`).join(', ') ?? '');
    this.body?.update(gpu);
  }

  #meter(node, text, part, label) {
    setText(node.firstChild, text);
    setAttribute(node, 'aria-label', `${label} ${text}`);
    setAttribute(node, 'role', 'img');
    setAttribute(node, 'title', text);
    node.style.setProperty('--air-part', `${isNumber(part) ? Math.min(part, 100) : 0}%`);
  }

  #toggle() {
    if (this.details.open && !this.body) {
      this.body = new GpuBody(this.panel, this.gpu);
      this.details.append(this.body.node);
      this.body.update(this.gpu);
    }
    this.panel.drawCharts();
  }

  close() {
    this.body?.close();
  }
}

/** CPU, memory and disk of the kernel's machine. */
class HostBody {
  constructor(panel) {
    this.cpu = new Metric(panel, {
      subject: 'Host',
      name: 'CPU',
      column: 'host/cpu_percent',
      tone: 'blue',
      format: percent,
      top: () => 100,
    });
    this.memory = new Metric(panel, {
      subject: 'Host',
      name: 'Memory',
      column: 'host/memory_percent',
      tone: 'orange',
      format: percent,
      top: () => 100,
    });
    this.disk = new Metric(panel, { name: 'Disk' });
    this.bar = make(
      'div',
      { class: 'air-meter air-tone-green', 'aria-hidden': 'true' },
      make('span', { text: '\u00a0' }),
    );
    this.disk.node.append(this.bar);
    this.metrics = new Metrics([this.cpu, this.memory, this.disk]);
    this.node = make('div', { class: 'air-body' }, this.metrics.node);
  }

  update({ host, now }) {
    const cpus = isNumber(host.cpu_count) ? `${plural(host.cpu_count, 'CPU')}` : null;
    this.cpu.update(percent(now?.cpu_percent), cpus);
    this.memory.update(gibibytes(now?.memory_used_bytes, host.memory_total_bytes));
    this.disk.update(gibibytes(now?.disk_used_bytes, host.disk_total_bytes), host.disk_path ?? null);
    const part = partOf(now?.disk_used_bytes, host.disk_total_bytes);
    this.bar.style.setProperty('--air-part', `${part ?? 0}%`);
  }
}

/** First section. */
class GpuSection {
  constructor(panel) {
    this.panel = panel;
    this.fold = new Fold('GPUs');
    this.reason = make('p', { class: 'air-notice', hidden: true }, make('span'));
    this.cards = make('ul', { class: 'air-cards air-scroll', 'aria-label': 'GPUs', hidden: true });
    this.cardRows = new KeyedList(this.cards, gpu => new GpuCard(panel, gpu));
    this.lines = make('ul', { class: 'air-scroll', 'aria-label': 'GPUs', hidden: true });
    this.lineRows = new KeyedList(this.lines, gpu => new GpuRow(panel, gpu));
    this.host = new HostBody(panel);
    this.hostSummary = make('span', { class: 'air-muted air-cut' });
    this.hostFold = make('details', { class: 'air-host', on: { toggle: () => panel.drawCharts() } });
    this.hostFold.append(make('summary', {}, make('b', { text: 'Host' }), this.hostSummary), this.host.node);
    this.hostCard = make('div', { class: 'air-card', hidden: true }, make('b', { text: 'Host' }));
    this.waiting = make('p', { class: 'air-empty', text: 'Waiting for the first values…' });
    this.fold.body.append(this.waiting, this.reason, this.cards, this.lines, this.hostCard, this.hostFold);
    this.node = this.fold.node;
    this.hostFold.hidden = true;
  }

  update() {
    const { devices } = this.panel;
    if (!devices) return;
    const gpus = this.#gpus(devices);
    const isCompact = gpus.length > MOST_CARDS;
    this.waiting.hidden = true;
    this.cards.hidden = isCompact || !gpus.length;
    this.lines.hidden = !isCompact;
    const keyOf = gpu => gpu.uuid;
    this.cardRows.update(isCompact ? [] : gpus, keyOf);
    this.lineRows.update(isCompact ? gpus : [], keyOf);
    this.#updateHost(devices, gpus.length > 0);
    this.#updateReason(devices.driver, gpus.length > 0);
    this.fold.count(this.#count(devices.driver, gpus));
  }

  #gpus(devices) {
    const now = new Map((this.panel.sample?.gpus ?? []).map(gpu => [gpu.uuid, gpu]));
    return devices.gpus.map(device => describeGpu(device, now.get(device.uuid), this.panel.processes.get(device.uuid)));
  }

  #count({ version }, gpus) {
    if (!gpus.length) return 'none on this machine';
    const broken = gpus.filter(gpu => gpu.isBroken).length;
    const parts = [String(gpus.length), broken && `${broken} failing`, version && `driver ${version}`];
    return parts.filter(Boolean).join(' · ');
  }

  /** Without GPUs the host takes their place, else it is folded below them. */
  #updateHost({ host }, hasGpus) {
    const place = hasGpus ? this.hostFold : this.hostCard;
    if (this.host.node.parentNode !== place) place.append(this.host.node);
    this.hostCard.hidden = hasGpus;
    this.hostFold.hidden = !hasGpus;
    const now = this.panel.sample?.host;
    this.host.update({ host, now });
    setCut(
      this.hostSummary,
      `CPU ${percent(now?.cpu_percent)} · memory ${gibibytes(now?.memory_used_bytes, host.memory_total_bytes)}`,
    );
  }

  #updateReason({ state, reason }, hasGpus) {
    const stale = this.panel.sample?.stale_s;
    const old = isNumber(stale) ? ` The values are ${age(stale)} old.` : '';
    let text = '';
    if (!hasGpus) text = state === 'ok' ? 'No GPU: the driver has none.' : `No GPU: ${reason || state}`;
    else if (state !== 'ok') text = `The driver does not answer: ${reason || state}.${old}`;
    else if (old) text = `The driver does not answer.${old}`;
    this.reason.hidden = !text;
    setText(this.reason.firstChild, text);
    setTone(this.reason, hasGpus ? 'bad' : '');
  }
}

/** A section that can be folded. */
class Fold {
  constructor(title) {
    this.counter = make('span', { class: 'air-muted air-cut' });
    this.body = make('div', { class: 'air-box' });
    const summary = make('summary', {}, make('h3', { text: title }), this.counter);
    this.node = make('details', { class: 'air-section', open: true }, summary, this.body);
  }

  count(text) {
    setCut(this.counter, text);
  }
}

// ------------------------------------------------------------------------------------------------------------- runs

const RUN_STATES = {
  STARTING: ['Starting', 'live'],
  RUNNING: ['Running', 'live'],
  FINISHED: ['Finished', 'good'],
  FAILED: ['Failed', 'bad'],
  KILLED: ['Killed', 'warn'],
  TIMED_OUT: ['Timed out', 'bad'],
};

function runState(run) {
  const [text, tone] = RUN_STATES[run.state] ?? [String(run.state), ''];
  return !run.is_live && tone === 'live' ? ['Gone', 'bad'] : [text, tone];
}

/** A run. */
class RunRow {
  constructor(panel) {
    this.panel = panel;
    this.name = make('span', { class: 'air-cut' });
    this.badge = make('span', { class: 'air-badge' });
    this.time = make('span', { class: 'air-time' });
    this.about = make('p', { class: 'air-cut air-muted' });
    this.line = make('p', { class: 'air-cut air-line' });
    this.figures = make('p', { class: 'air-muted' });
    this.reason = make('p', { class: 'air-note' });
    this.note = new Note();
    this.stop = new Action({
      label: 'Stop',
      busy: 'Stopping…',
      danger: true,
      question: () => `Stop ${this.run.name}?`,
      run: () => this.#stop(),
    });
    this.logs = make('button', {
      type: 'button',
      text: 'Logs',
      'aria-expanded': 'false',
      on: { click: () => this.#toggleLog() },
    });
    this.link = make('a', { target: '_blank', rel: 'noopener' });
    this.linkText = make('span', { class: 'air-cut air-link-text air-muted' });
    this.log = null;
    const actions = make(
      'div',
      { class: 'air-actions' },
      this.logs,
      this.stop.button,
      this.link,
      this.linkText,
      this.stop.confirm,
    );
    const head = make('div', { class: 'air-head' }, this.name, this.badge, this.time);
    this.node = make(
      'li',
      { class: 'air-row' },
      head,
      this.about,
      this.line,
      this.figures,
      this.reason,
      actions,
      this.note.node,
    );
  }

  update(run) {
    this.run = run;
    const [state, tone] = runState(run);
    setAttribute(this.node, 'aria-label', `${run.name}: ${state}`);
    setCut(this.name, run.name, `${run.name}\n${run.run_id}`);
    setText(this.badge, state);
    setTone(this.badge, tone);
    const place = run.is_mine ? 'this notebook' : run.notebook || 'another notebook';
    setCut(this.about, `${plural(run.nproc, 'rank')} · ${run.device} · ${place}`);
    setCut(this.line, run.line ?? '');
    this.line.hidden = !run.line;
    setText(this.figures, run.figures ?? '');
    this.figures.hidden = !run.figures;
    setText(this.reason, run.reason ?? '');
    this.reason.hidden = !run.reason;
    setTone(this.reason, tone);
    this.stop.update({ subject: run.name, isShown: run.is_live });
    setAttribute(this.logs, 'aria-label', `Logs of ${run.name}`);
    this.#updateLink(run);
    this.log?.update(run);
    this.tick();
  }

  #updateLink({ link, name }) {
    const href = link?.href ? safeHref(link.href) : null;
    this.link.hidden = !href;
    setAttribute(this.link, 'href', href);
    setText(this.link, link?.label ?? '');
    setAttribute(this.link, 'aria-label', `${link?.label ?? ''}: page of ${name}, opens in a new tab`);
    this.linkText.hidden = !link || Boolean(href);
    setCut(this.linkText, link && !href ? `${link.label}: ${link.text}` : '');
  }

  /** Elapsed time, counted by the page. */
  tick() {
    const { is_live: isLive, started_at: started, created_at: created, ended_at: ended } = this.run;
    const from = started ?? created;
    const to = ended ?? (isLive ? this.panel.now() : null);
    setText(this.time, isNumber(from) && isNumber(to) ? duration(to - from) : '');
    setAttribute(this.time, 'title', `${isLive ? 'Running since' : 'Started'} ${fullTime(from)}`);
  }

  async #stop() {
    this.note.show(await this.panel.ask('stop', { run_id: this.run.run_id }));
  }

  #toggleLog() {
    if (this.log) return this.#closeLog();
    this.log = new LogView(this.panel, this.run, () => this.#closeLog());
    setAttribute(this.logs, 'aria-expanded', 'true');
    this.node.append(this.log.node);
    this.log.open();
  }

  #closeLog() {
    this.log.close();
    this.log = null;
    setAttribute(this.logs, 'aria-expanded', 'false');
    this.logs.focus({ preventScroll: true });
  }

  close() {
    this.log?.close();
  }
}

/** The answer to a request, below the row that asked. */
class Note {
  constructor() {
    this.node = make('p', { class: 'air-note', hidden: true });
  }

  show({ ok, text }) {
    setText(this.node, text);
    setTone(this.node, ok ? '' : 'bad');
    this.node.hidden = !text;
  }
}

/** Second section. */
/** Say why rows are old ones, if they are. */
function showProblem(node, problem) {
  setText(node, problem ? `Not up to date: ${problem}` : '');
  node.hidden = !problem;
}

class RunSection {
  constructor(panel) {
    this.panel = panel;
    this.fold = new Fold('Runs');
    this.empty = make('p', { class: 'air-empty', text: 'None yet. A cell with %%distributed starts one.' });
    this.more = make('p', { class: 'air-empty', hidden: true });
    this.problem = make('p', { class: 'air-note air-bad', hidden: true });
    this.list = make('ul', { 'aria-label': 'Runs' });
    this.rows = new KeyedList(this.list, () => new RunRow(panel));
    this.fold.body.append(make('div', { class: 'air-scroll' }, this.problem, this.list, this.empty, this.more));
    this.node = this.fold.node;
  }

  update() {
    const { runs, more } = this.panel;
    showProblem(this.problem, this.panel.runsProblem);
    const rank = run => (run.is_mine ? 0 : run.is_live ? 1 : 2);
    this.rows.update(
      [...runs].sort((a, b) => rank(a) - rank(b)),
      run => run.run_id,
    );
    this.empty.hidden = runs.length > 0;
    this.more.hidden = !more;
    setText(this.more, `${more} more are not shown.`);
    const live = runs.filter(run => run.is_live).length;
    this.fold.count(live ? `${live} running` : '');
  }

  tick() {
    for (const row of this.rows.rows.values()) row.tick();
  }

  onLog(message) {
    this.rows.rows.get(message.run_id)?.log?.onLog(message);
  }

  close() {
    this.rows.clear();
  }
}

// ------------------------------------------------------------------------------------------------------------- logs

/** Lines of a terminal's output: without colours, with carriage returns and backspaces carried out. Holds no DOM. */
class LogText {
  constructor() {
    this.lines = []; // finished since the last `take`
    this.current = '';
    this.column = 0;
    this.rest = ''; // the beginning of an escape sequence that was cut by the end of a piece
  }

  feed(text) {
    const all = this.rest + text;
    const cut = /\x1b(?:\[[0-?]*[ -/]*|\][^\x07\x1b]{0,500})?$/.exec(all);
    this.rest = cut ? cut[0] : '';
    const pattern = /\x1b\[([0-?]*)[ -/]*([@-~])|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b.?|[\n\r\b]|[^\x1b\n\r\b]+/gs;
    for (const [token, values, command] of all.slice(0, all.length - this.rest.length).matchAll(pattern))
      this.#token(token, values, command);
  }

  #token(token, values, command) {
    if (token === '\n') this.#endLine();
    else if (token === '\r') this.column = 0;
    else if (token === '\b') this.column = Math.max(0, this.column - 1);
    else if (command === 'K') this.#erase(values);
    else if (token[0] !== '\x1b') this.#write(token.replace(/[\x00-\x08\x0b-\x1f\x7f]/g, '\ufffd'));
  }

  #erase(values) {
    if (values === '2') this.current = ' '.repeat(Math.min(this.column, this.current.length));
    else if (values !== '1') this.current = this.current.slice(0, this.column);
  }

  #write(text) {
    const room = LOG_LINE_CHARS - this.column;
    const fitting = text.length > room ? `${text.slice(0, Math.max(room, 0))}` : text;
    this.current = this.current.slice(0, this.column) + fitting + this.current.slice(this.column + fitting.length);
    this.column += fitting.length;
    if (fitting.length < text.length && !this.current.endsWith('…')) this.current += '…';
  }

  #endLine() {
    this.lines.push(this.current);
    if (this.lines.length > LOG_LINES) this.lines.shift();
    this.current = '';
    this.column = 0;
  }

  /** The lines finished since the last call. */
  take() {
    return this.lines.splice(0);
  }
}

/** Output of a run's ranks, as it comes. */
class LogView {
  constructor(panel, run, onClose) {
    this.panel = panel;
    this.run = run;
    this.ranks = make('select', { on: { change: () => this.#restart() } });
    this.follow = make('input', { type: 'checkbox', on: { change: () => this.#scroll() } });
    this.follow.checked = true;
    this.state = make('span', { class: 'air-muted' });
    const close = make('button', {
      type: 'button',
      text: 'Close',
      'aria-label': `Close logs of ${run.name}`,
      on: { click: onClose },
    });
    this.box = make('pre', { tabindex: 0, role: 'log', 'aria-live': 'off', 'aria-label': `Output of ${run.name}` });
    this.box.addEventListener('scroll', () => this.#onScroll());
    const bar = make(
      'div',
      {},
      make('label', {}, 'Rank', this.ranks),
      make('label', {}, this.follow, 'Follow'),
      this.state,
      close,
    );
    this.node = make('div', { class: 'air-log' }, bar, this.box);
    this.update(run);
  }

  update(run) {
    this.run = run;
    while (this.ranks.length > run.nproc) this.ranks.lastChild.remove();
    for (let rank = this.ranks.length; rank < run.nproc; rank++)
      this.ranks.append(make('option', { value: rank, text: String(rank) }));
  }

  open() {
    this.#restart();
    this.ranks.focus({ preventScroll: true });
    this.node.scrollIntoView({ block: 'nearest' });
  }

  close() {
    this.isClosed = true;
    clearTimeout(this.timer);
    this.node.remove();
  }

  get rank() {
    return Number(this.ranks.value);
  }

  #restart() {
    clearTimeout(this.timer);
    this.text = new LogText();
    this.offset = -1;
    this.box.replaceChildren();
    this.last = null;
    this.follow.checked = true;
    setText(this.state, 'Reading…');
    this.#ask();
  }

  async #ask() {
    this.timer = setTimeout(() => this.#again(), LOG_LOST_MS); // if no answer comes
    const { rank, text } = this;
    const answer = await this.panel.ask(
      'log',
      { run_id: this.run.run_id, rank, offset: this.offset },
      { isQuiet: true },
    );
    if (answer.ok || this.isClosed || this.text !== text) return;
    clearTimeout(this.timer);
    setText(this.state, answer.text);
  }

  /** A page that nobody sees does not read. */
  #again() {
    clearTimeout(this.timer);
    if (this.panel.presence.state === 'hidden') this.timer = setTimeout(() => this.#again(), LOG_AGAIN_MS);
    else this.#ask();
  }

  onLog(message) {
    if (message.rank !== this.rank || (this.offset >= 0 && message.offset !== this.offset)) return;
    clearTimeout(this.timer);
    if (this.offset < 0 && message.offset > 0) this.#append(['… what came before is in the file of the run']);
    this.offset = message.next_offset;
    this.text.feed(message.text);
    this.#show();
    setText(this.state, message.is_end ? 'Complete' : 'Live');
    if (!message.is_end) this.timer = setTimeout(() => this.#again(), message.text ? LOG_AGAIN_MS / 4 : LOG_AGAIN_MS);
  }

  #show() {
    const lines = this.text.take();
    if (lines.length) {
      this.last?.remove();
      this.last = null;
      this.#append(lines);
    }
    if (this.text.current) {
      this.last ??= this.box.appendChild(make('div'));
      setText(this.last, this.text.current);
    }
    this.#scroll();
  }

  #append(lines) {
    this.box.append(...lines.map(text => make('div', { text })));
    while (this.box.childElementCount > LOG_LINES) this.box.firstChild.remove();
  }

  #scroll() {
    if (this.follow.checked) this.box.scrollTop = this.box.scrollHeight;
  }

  /** Who scrolls up wants to read; who scrolls to the end wants to follow. */
  #onScroll() {
    this.follow.checked = this.box.scrollHeight - this.box.scrollTop - this.box.clientHeight < 8;
  }
}

// ------------------------------------------------------------------------------------------------------ checkpoints

function checkpointState(row) {
  if (row.verifying) return ['Verifying…', 'live'];
  if (row.state === 'damaged') return ['Damaged', 'bad'];
  if (row.state === 'incomplete') return ['Incomplete', 'warn'];
  if (row.verified === false) return ['Verification failed', 'bad'];
  if (row.verified) return ['Verified', 'good'];
  return [row.state === 'foreign' ? 'Foreign' : 'Not verified', ''];
}

/** A checkpoint. */
class CheckpointRow {
  constructor(panel) {
    this.panel = panel;
    this.step = make('span', { class: 'air-cut' });
    this.badge = make('span', { class: 'air-badge' });
    this.time = make('span', { class: 'air-time air-muted' });
    this.about = make('p', { class: 'air-cut air-muted' });
    this.problem = make('p', { class: 'air-note' });
    this.note = new Note();
    this.resume = new Action({
      label: 'Resume',
      busy: 'Resuming…',
      question: () => this.#question(),
      run: () => this.#resume(),
    });
    this.copy = new Action({ label: 'Copy', run: () => this.#copy() });
    this.verify = new Action({ label: 'Verify', busy: 'Verifying…', run: () => this.#verify() });
    const buttons = [this.resume.button, this.copy.button, this.verify.button];
    const actions = make('div', { class: 'air-actions' }, ...buttons, this.resume.confirm);
    const head = make('div', { class: 'air-head' }, this.step, this.badge, this.time);
    this.node = make('li', { class: 'air-row' }, head, this.about, this.problem, actions, this.note.node);
  }

  update(row) {
    this.row = row;
    const name = isNumber(row.step)
      ? `step ${row.step.toLocaleString('en')}`
      : (row.path.split('/').filter(Boolean).pop() ?? row.path);
    const [state, tone] = checkpointState(row);
    this.name = name;
    setAttribute(this.node, 'aria-label', `${name}: ${state}`);
    setCut(this.step, name[0].toUpperCase() + name.slice(1), row.path);
    setText(this.badge, state);
    setTone(this.badge, tone);
    const from = row.run_name || row.run_id;
    setCut(
      this.about,
      [isNumber(row.size_bytes) ? size(row.size_bytes) : 'size n/a', from && `from ${from}`]
        .filter(Boolean)
        .join(' · '),
    );
    setText(this.problem, row.problem ?? '');
    this.problem.hidden = !row.problem;
    setTone(this.problem, tone === 'bad' ? 'bad' : '');
    this.resume.update({ subject: name, why: row.can_resume ? '' : this.#whyNot(row) });
    this.copy.update({ subject: `--resume option of ${name}` });
    this.verify.update({ subject: name });
    this.verify.setBusy(row.verifying);
    this.tick();
  }

  #whyNot({ run_id: id }) {
    const isLive = this.panel.runs.some(run => run.run_id === id && run.is_live);
    if (isLive) return 'The run that wrote it goes on: stop it first';
    return 'The run that wrote it can’t be launched again from here';
  }

  tick() {
    const { created_at: created } = this.row;
    setText(this.time, isNumber(created) ? `${age(this.panel.now() - created)} ago` : '');
    setAttribute(this.time, 'title', fullTime(created) || null);
  }

  #question() {
    return `Launch ${this.row.run_name || 'the run'} again from ${this.name}?`;
  }

  async #resume() {
    this.note.show(await this.panel.ask('resume', { run_id: this.row.run_id, path: this.row.path }));
  }

  async #verify() {
    this.note.show(await this.panel.ask('verify', { path: this.row.path }));
  }

  async #copy() {
    const text = `--resume ${quoted(this.row.path)}`;
    const ok = await copyText(text);
    const answer = {
      ok,
      text: ok ? `Copied: ${text}` : `The browser does not let this page copy. The option is: ${text}`,
    };
    this.note.show(answer);
    this.panel.announce(answer.text);
  }
}

/** Whether the browser took it. Its clipboard interface is missing on pages without https. */
async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const field = make('textarea', { 'aria-hidden': 'true', style: 'position:fixed;opacity:0' });
    const focused = document.activeElement;
    field.value = text;
    document.body.append(field);
    field.select();
    const ok = document.execCommand('copy');
    field.remove();
    focused?.focus({ preventScroll: true });
    return ok;
  }
}

/** The checkpoints below one root. */
class RootGroup {
  constructor(panel) {
    this.title = make('h4', { class: 'air-cut' });
    this.problem = make('p', { class: 'air-note air-bad' });
    this.list = make('ul');
    this.rows = new KeyedList(this.list, () => new CheckpointRow(panel));
    this.more = make('p', { class: 'air-empty' });
    this.node = make('section', { class: 'air-root' }, this.title, this.problem, this.list, this.more);
  }

  update({ root, problem, checkpoints, more }) {
    setCut(this.title, root);
    setAttribute(this.list, 'aria-label', `Checkpoints in ${root}`);
    setText(this.problem, problem ?? '');
    this.problem.hidden = !problem;
    this.rows.update(checkpoints, row => row.path);
    setText(this.more, more ? `${more} more are not shown.` : 'No checkpoints here.');
    this.more.hidden = !more && (checkpoints.length > 0 || Boolean(problem));
  }

  tick() {
    for (const row of this.rows.rows.values()) row.tick();
  }
}

/** Third section. */
class CheckpointSection {
  constructor(panel) {
    this.panel = panel;
    this.fold = new Fold('Checkpoints');
    this.empty = make('p', { class: 'air-empty', text: 'None yet. Runs that save checkpoints list them here.' });
    this.problem = make('p', { class: 'air-note air-bad', hidden: true });
    this.list = make('div');
    this.roots = new KeyedList(this.list, () => new RootGroup(panel));
    this.fold.body.append(make('div', { class: 'air-scroll' }, this.problem, this.list, this.empty));
    this.node = this.fold.node;
  }

  update() {
    const { roots } = this.panel;
    showProblem(this.problem, this.panel.rootsProblem);
    this.roots.update(roots, root => root.root);
    this.empty.hidden = roots.length > 0;
    const count = roots.reduce((sum, root) => sum + root.checkpoints.length + (root.more ?? 0), 0);
    this.fold.count(count ? count.toLocaleString('en') : '');
  }

  tick() {
    for (const root of this.roots.rows.values()) root.tick();
  }
}

// --------------------------------------------------------------------------------------------------------- presence

/**
 * Tells whether anybody looks: active, hidden (folded away, another tab) or idle (no input for `idle_s`). Said on a
 * change and, while active, again and again: timers of a hidden tab are slow, so silence must count as gone.
 */
class Presence {
  constructor(root, tell) {
    this.tell = tell;
    this.view = randomId();
    this.state = null;
    this.isSeen = false;
    this.idle_s = 300;
    this.touchedAt = Date.now();
    this.stops = [];
    const observer = new IntersectionObserver(entries => this.#onSeen(entries.at(-1).isIntersecting));
    observer.observe(root);
    this.stops.push(() => observer.disconnect());
    this.#listen();
    this.setIdle(this.idle_s);
  }

  #listen() {
    const on = (target, event, listener) => {
      target.addEventListener(event, listener, { passive: true, capture: true });
      this.stops.push(() => target.removeEventListener(event, listener, { capture: true }));
    };
    for (const event of ['pointerdown', 'pointermove', 'keydown', 'wheel', 'touchstart'])
      on(document, event, () => this.#touch());
    on(document, 'visibilitychange', () => this.#onSeen(this.isSeen));
    on(window, 'pagehide', () => this.#send('gone'));
    on(window, 'pageshow', () => this.check());
  }

  setIdle(idle_s) {
    this.idle_s = idle_s;
    clearInterval(this.timer);
    this.timer = setInterval(() => this.check({ isBeat: true }), Math.max(100, idle_s * 100));
  }

  #touch() {
    this.touchedAt = Date.now();
    if (this.state !== 'active') this.check();
  }

  /** Coming into sight counts as looking. */
  #onSeen(isSeen) {
    this.isSeen = isSeen;
    if (isSeen && document.visibilityState === 'visible') this.touchedAt = Date.now();
    this.check();
  }

  check({ isBeat = false } = {}) {
    const isVisible = this.isSeen && document.visibilityState === 'visible';
    const isIdle = Date.now() - this.touchedAt > 1000 * this.idle_s;
    const state = isVisible ? (isIdle ? 'idle' : 'active') : 'hidden';
    if (state !== this.state || (isBeat && state === 'active')) this.#send(state);
  }

  /** Say it again: to a connection that has not heard it, or because the user wants to see values. */
  repeat({ isTouch = false } = {}) {
    if (isTouch) this.touchedAt = Date.now();
    this.state = null;
    this.check();
  }

  #send(state) {
    this.state = state;
    this.tell({ type: 'presence', view: this.view, state });
  }

  stop() {
    clearInterval(this.timer);
    for (const stop of this.stops) stop();
    if (this.state !== 'gone') this.#send('gone');
  }
}

/** Not randomUUID: that is missing on pages without https. */
const randomId = () =>
  Array.from(crypto.getRandomValues(new Uint8Array(16)), byte => byte.toString(16).padStart(2, '0')).join('');

// -------------------------------------------------------------------------------------------------------- the panel

/** Time of the last values, interval, Refresh; below it what is wrong or paused. */
class Toolbar {
  constructor(panel) {
    this.panel = panel;
    this.updated = make('span', { class: 'air-updated' });
    this.interval = make('select', {
      'aria-label': 'Interval of the samples',
      on: { change: () => this.#setInterval() },
    });
    this.refresh = new Action({ label: 'Refresh', run: () => this.#refresh() });
    this.refresh.update({ subject: 'values' });
    this.node = make(
      'div',
      { class: 'air-toolbar' },
      this.updated,
      make('label', {}, 'every ', this.interval),
      this.refresh.button,
    );
    this.paused = make('div', { class: 'air-notice', hidden: true }, make('span'));
    this.paused.append(
      make('button', {
        type: 'button',
        text: 'Resume',
        'aria-label': 'Resume polling',
        on: { click: () => panel.wake() },
      }),
    );
    this.trouble = make('div', { class: 'air-notice air-bad', hidden: true }, make('span'));
    this.#setOptions(10);
  }

  update() {
    const { panel } = this;
    const at = panel.sample?.at;
    setText(this.updated, isNumber(at) ? `Updated ${time(at)}` : 'No values yet');
    setAttribute(this.updated, 'title', fullTime(at) || null);
    this.#setOptions(panel.interval_s);
    const paused = panel.whyPaused();
    this.paused.hidden = !paused;
    setText(this.paused.firstChild, paused);
    const trouble = panel.trouble();
    this.trouble.hidden = !trouble;
    setText(this.trouble.firstChild, trouble);
  }

  #setOptions(current) {
    const all = INTERVALS_S.includes(current) ? INTERVALS_S : [...INTERVALS_S, current].sort((a, b) => a - b);
    if (this.interval.length !== all.length) {
      this.interval.replaceChildren(
        ...all.map(each =>
          make('option', { value: each, text: each < 120 ? `${each} s` : `${Math.round(each / 60)} min` }),
        ),
      );
    }
    if (this.interval.value !== String(current)) this.interval.value = String(current);
  }

  async #setInterval() {
    this.panel.complain(await this.panel.ask('interval', { seconds: Number(this.interval.value) }));
    this.update();
  }

  async #refresh() {
    if (!this.panel.isGreeted) this.panel.resync();
    this.panel.complain(await this.panel.ask('refresh', {}, { isQuiet: true }));
  }
}

/** Everything on one root: what the messages said, the sections, the requests on their way. */
class Panel {
  constructor(model, root) {
    this.model = model;
    this.root = root;
    this.hello = { interval_s: 10, idle_s: 300, window_s: 7200, points: 720 };
    this.isGreeted = false;
    this.isLost = false;
    this.complaint = '';
    this.skew_s = 0; // how far this clock is ahead of the kernel's
    this.leastSkew = null;
    this.charts = new Set();
    this.dirty = new Set();
    this.requests = new Map();
    this.lastRequest = 0;
    this.#forget();
    this.#build();
    this.presence = new Presence(root, message => this.#send(message));
    this.#watchLooks();
    this.clock = setInterval(() => this.#tick(), 1000);
    this.stopListening = model.onMessage(message => this.#receive(message));
  }

  /** What is known of a kernel. */
  #forget() {
    this.nextSeq = 0;
    this.devices = null;
    this.sample = null;
    this.status = null;
    this.processes = new Map();
    this.runs = [];
    this.more = 0;
    this.roots = [];
    this.history = new History(this.hello.points);
  }

  #build() {
    this.root.classList.add('air-panel');
    this.live = make('div', { class: 'air-spoken', role: 'status', 'aria-live': 'polite' });
    this.tip = new Tip(this.root);
    this.toolbar = new Toolbar(this);
    this.sections = {
      gpus: new GpuSection(this),
      runs: new RunSection(this),
      checkpoints: new CheckpointSection(this),
    };
    const nodes = Object.values(this.sections).map(section => section.node);
    this.root.append(this.toolbar.node, this.toolbar.trouble, this.toolbar.paused, ...nodes, this.live, this.tip.node);
    for (const node of nodes) node.addEventListener('toggle', () => this.drawCharts());
  }

  /** Charts are drawn again when their width or the theme changes. */
  #watchLooks() {
    const draw = () => this.drawCharts();
    this.resized = new ResizeObserver(draw);
    this.resized.observe(this.root);
    this.themed = new MutationObserver(draw);
    this.themed.observe(document.body, { attributes: true, attributeFilter: ['class', 'data-jp-theme-light'] });
    this.preference = window.matchMedia('(prefers-color-scheme: dark)');
    this.preference.addEventListener('change', draw);
    this.stopWatching = () => this.preference.removeEventListener('change', draw);
  }

  close() {
    this.presence.stop();
    this.stopListening?.();
    clearInterval(this.clock);
    this.resized.disconnect();
    this.themed.disconnect();
    this.stopWatching();
    this.sections.runs.close();
    cancelAnimationFrame(this.frame);
    this.#failRequests('The panel was closed.');
    this.root.replaceChildren();
    this.root.classList.remove('air-panel');
  }

  // Time: the kernel may run on a machine with another clock.

  /** The kernel's time. */
  now() {
    return Date.now() / 1000 - this.skew_s;
  }

  get interval_s() {
    return this.status?.interval_s ?? this.hello.interval_s;
  }

  // Messages from the kernel.

  #receive(message) {
    try {
      if (message?.type === 'connection') this.#onConnection(message);
      else if (isNumber(message?.seq)) this.#inOrder(message);
    } catch (error) {
      console.error(`air_nb: the message ${message?.type} could not be shown`, error);
    }
  }

  #inOrder(message) {
    if (message.type === 'hello') this.resyncAt = null;
    else if (message.seq !== this.nextSeq) this.resync();
    this.nextSeq = message.seq + 1;
    Panel.HANDLERS[message.type]?.(this, message);
  }

  /** Ask for everything again; once per loss, and again only if nothing has come of it. */
  resync() {
    if (this.resyncAt && Date.now() - this.resyncAt < RESYNC_AGAIN_MS) return;
    this.resyncAt = Date.now();
    this.#send({ type: 'resync' });
  }

  static HANDLERS = {
    hello: (panel, message) => panel.#onHello(message),
    devices: (panel, message) => panel.#keep('gpus', { devices: message }),
    history: (panel, message) => {
      panel.history.load(message);
      panel.#redraw('gpus');
    },
    sample: (panel, message) => panel.#onSample(message),
    processes: (panel, message) =>
      panel.#keep('gpus', { processes: new Map(message.gpus.map(gpu => [gpu.uuid, gpu.processes])) }),
    runs: (panel, message) => panel.#keep('runs', { runs: message.runs, more: message.more ?? 0, runsProblem: message.problem }),
    checkpoints: (panel, message) =>
      panel.#keep('checkpoints', { roots: message.roots, rootsProblem: message.problem }),
    status: (panel, message) => panel.#keep('toolbar', { status: message }),
    reply: (panel, message) => panel.#onReply(message),
    log: (panel, message) => {
      panel.#settle(message.request, { ok: true, text: '' });
      panel.sections.runs.onLog(message);
    },
  };

  #onHello(message) {
    const isOther = this.hello.kernel_id !== message.kernel_id || this.hello.pid !== message.pid;
    this.hello = { ...this.hello, ...message };
    this.isGreeted = true;
    this.isLost = false;
    this.skew_s = 0;
    this.leastSkew = null;
    if (isOther) this.#forget();
    this.nextSeq = message.seq + 1;
    this.history.limit = this.hello.points;
    this.presence.setIdle(this.hello.idle_s);
    this.presence.repeat();
    this.#redraw('toolbar');
  }

  #onSample(message) {
    this.sample = message;
    this.#learnSkew(message);
    const values = new Map();
    const totals = new Map((this.devices?.gpus ?? []).map(gpu => [gpu.uuid, gpu.memory_total_bytes]));
    for (const gpu of isNumber(message.stale_s) ? [] : message.gpus) {
      const part = partOf(gpu.memory_used_bytes, totals.get(gpu.uuid));
      const row = [gpu.utilization_percent, part, gpu.temperature_celsius, gpu.power_watts];
      SERIES.forEach((name, index) => values.set(`${gpu.uuid}/${name}`, row[index]));
    }
    values.set('host/cpu_percent', message.host?.cpu_percent);
    values.set('host/memory_percent', partOf(message.host?.memory_used_bytes, this.devices?.host.memory_total_bytes));
    this.history.append(message.at, values);
    this.#redraw('gpus');
  }

  /**
   * The least delay seen is the best guess of the clocks' difference; less than 2 s is rather the way here. The first
   * sample after hello may be old.
   */
  #learnSkew({ at }) {
    const isFirst = this.leastSkew === null;
    this.leastSkew = isFirst ? Infinity : Math.min(this.leastSkew, Date.now() / 1000 - at);
    this.skew_s = isFirst || Math.abs(this.leastSkew) < 2 ? 0 : this.leastSkew;
  }

  #keep(section, values) {
    Object.assign(this, values);
    this.#redraw(section);
  }

  #onConnection({ state }) {
    this.isLost = state === 'lost';
    this.#failRequests('The connection to the kernel was lost: whether it was done is not known.');
    this.#redraw('toolbar');
  }

  // Requests.

  #send(message) {
    this.model.send(message);
  }

  /**
   * Send a request.
   * @returns {Promise<{ok: boolean, text: string}>} the kernel's answer
   */
  ask(type, fields, { isQuiet = false } = {}) {
    const request = ++this.lastRequest;
    return new Promise(resolve => {
      this.requests.set(request, answer => {
        if (!isQuiet) this.announce(answer.text);
        resolve(answer);
      });
      this.#send({ type, request, ...fields });
    });
  }

  #onReply({ request, ok, text }) {
    this.#settle(request, { ok, text: String(text ?? '') });
  }

  #settle(request, answer) {
    const resolve = this.requests.get(request);
    this.requests.delete(request);
    resolve?.(answer);
  }

  #failRequests(text) {
    for (const request of [...this.requests.keys()]) this.#settle(request, { ok: false, text });
  }

  /** For screen readers. */
  announce(text) {
    setText(this.live, text);
  }

  /** Show what went wrong with a request that has no row of its own, until the next one works. */
  complain({ ok, text }) {
    this.complaint = ok ? '' : text;
    this.#redraw('toolbar');
  }

  /** The user wants to see values. */
  wake() {
    this.presence.repeat({ isTouch: true });
    this.ask('refresh', {}, { isQuiet: true });
  }

  whyPaused() {
    if (!this.isGreeted || this.isLost) return '';
    const isOld = this.sample && this.now() - this.sample.at > 2.5 * this.interval_s;
    const isIdle = this.presence.state === 'idle' && isOld;
    if (isIdle || (this.status?.status === 'paused' && this.presence.state === 'idle')) {
      return `Paused after ${age(this.hello.idle_s)} without activity`;
    }
    return this.status?.status === 'paused' ? `Paused${this.status.why ? `: ${this.status.why}` : ''}` : '';
  }

  trouble() {
    if (this.isLost) return 'The connection to the kernel is lost. Trying again…';
    if (!this.isGreeted) return '';
    if (this.complaint) return this.complaint;
    const late = this.sample ? this.now() - this.sample.at : 0;
    const isLate =
      this.status?.status === 'polling' && this.presence.state === 'active' && late > Math.max(3 * this.interval_s, 15);
    return isLate ? `No new values for ${age(late)}.` : '';
  }

  // Drawing: at most once per frame, and not at all while the browser shows something else.

  #redraw(section) {
    this.dirty.add(section);
    this.frame ??= requestAnimationFrame(() => this.#draw());
  }

  #draw() {
    this.frame = null;
    const dirty = [...this.dirty];
    this.dirty.clear();
    for (const section of dirty) this.sections[section]?.update();
    this.toolbar.update();
    if (dirty.includes('gpus')) this.drawCharts();
  }

  drawCharts() {
    for (const chart of this.charts) chart.draw();
  }

  #tick() {
    if (this.presence.state === 'hidden') return;
    this.toolbar.update();
    this.sections.runs.tick();
    this.sections.checkpoints.tick();
  }
}

/**
 * Draw the panel.
 * @param {{send: function(object): void, onMessage: function(function(object): void): function(): void}} model the way
 *   to the kernel; besides the kernel's messages it may say {type: 'connection', state: 'lost' | 'renewed'}
 * @param {HTMLElement} root an empty element
 * @returns {function(): void} ends it
 */
export function mount(model, root) {
  const panel = new Panel(model, root);
  return () => panel.close();
}

// -------------------------------------------------------------------------------------------------------- anywidget

/** The page's sidebar has the panel: one line that shows or hides it. */
function renderPointer(el, airNb) {
  const button = make('button', { type: 'button' });
  const update = () => setText(button, airNb.isVisible() ? 'Hide' : 'Show');
  button.addEventListener('click', () => {
    if (airNb.isVisible()) airNb.hide();
    else airNb.show();
    update();
  });
  const line = make(
    'div',
    { class: 'air-panel air-toolbar' },
    make('span', { text: 'GPU panel: in the right sidebar' }),
    button,
  );
  for (const event of ['pointerenter', 'focusin']) line.addEventListener(event, update);
  el.append(line);
  update();
}

function adapt(model) {
  return {
    send: message => model.send(message),
    onMessage: callback => {
      const listener = message => callback(message);
      model.on('msg:custom', listener);
      return () => model.off('msg:custom', listener);
    },
  };
}

export default {
  initialize({ model }) {
    const id = model.get('kernel_id');
    if (id) window.airNb?.announce(id);
  },

  render({ model, el }) {
    if (window.airNb) return renderPointer(el, window.airNb);
    const adapted = adapt(model);
    const root = el.appendChild(make('div'));
    const unmount = mount(adapted, root);
    adapted.send({ type: 'resync' }); // what the kernel has said before this view was there, nobody heard
    return unmount;
  },
};
