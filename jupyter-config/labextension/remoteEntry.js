/**
 * The right sidebar in JupyterLab and Jupyter Notebook 7: the panel of panel.js for the current notebook's kernel.
 *
 * A module federation container written by hand, which is all that JupyterLab wants of a prebuilt extension: `init`
 * gets what Lab shares, `get` gives our plugin. It asks for no Lab token and uses only app.shell, app.serviceManager
 * and @lumino/widgets: that is why one file runs in all versions that we support.
 *
 * The panel talks to the kernel by a WebSocket, a subshell and a comm of its own. The widgets' comms are dead from a
 * page reload until the running cell ends, and a training cell runs for hours.
 */
(window._JUPYTERLAB = window._JUPYTERLAB || {})['air-nb'] = (() => {
  const OWN_URL = document.currentScript.src;
  // Names with the hash of the content, put in when the wheel is built (hatch_build.py).
  const PANEL_JS = new URL('{panel.js}', OWN_URL).href;
  const PANEL_CSS = new URL('{panel.css}', OWN_URL).href;

  const ID = 'air-nb-panel';
  const TITLE = 'GPUs, runs and checkpoints (air_nb)';
  const PANEL_TARGET = 'air_nb.panel';
  const ANNOUNCE_TARGET = 'air_nb.announce';
  const FIRST_RETRY_MS = 1000;
  const LAST_RETRY_MS = 30000;
  const SAY_BUSY_MS = 3000;
  const CLOSE_MS = 5000; // for the subshell to hear the farewell, at most
  const FLUSH_MS = 1000;
  const LOAD = 'Run %load_ext air_nb in this notebook.';
  const HINTS = {
    none: 'Open a notebook to see its GPUs, runs and checkpoints.',
    noKernel: 'This notebook has no kernel. Start one, then run %load_ext air_nb.',
    unknown: `${LOAD} If it is loaded already, %air sidebar connects this page.`,
    busy: `The kernel is busy and has not told this page yet that air_nb is loaded. When it is idle: ${LOAD}`,
    waiting: 'Waiting for the kernel: it answers when the running cell has ended.',
    connecting: 'Connecting to the kernel…',
    restarted: 'The kernel was restarted. Run %load_ext air_nb again.',
    dead: 'The kernel has died. Restart it, then run %load_ext air_nb.',
    unloaded: `air_nb is not loaded in this kernel. ${LOAD}`,
    broken:
      'The panel could not be loaded; the browser’s console says why. Reload the page after an upgrade of air_nb.',
  };

  /** Not randomUUID: that is missing on pages without https. */
  const randomId = () =>
    Array.from(crypto.getRandomValues(new Uint8Array(16)), byte => byte.toString(16).padStart(2, '0')).join('');

  // ------------------------------------------------------------------------------------ kernels that have air_nb

  /** Kernels that announced themselves, over page reloads. A busy kernel can't say it again. */
  const memory = {
    PREFIX: 'air-nb:',
    LONGEST_MS: 14 * 24 * 3600 * 1000,

    has: id => memory.attempt(() => localStorage.getItem(memory.PREFIX + id) !== null),
    add: id => memory.attempt(() => localStorage.setItem(memory.PREFIX + id, String(Date.now()))),
    remove: id => memory.attempt(() => localStorage.removeItem(memory.PREFIX + id)),

    prune: () =>
      memory.attempt(() => {
        for (const key of Object.keys(localStorage).filter(each => each.startsWith(memory.PREFIX))) {
          if (!(Date.now() - Number(localStorage.getItem(key)) < memory.LONGEST_MS)) localStorage.removeItem(key);
        }
      }),

    /** A browser may forbid storage: then only this page knows. */
    attempt: action => {
      try {
        return action();
      } catch {
        return false;
      }
    },
  };

  /** Subshells that this tab has left behind in a kernel: by a page before, or by connections that broke. */
  const leftovers = {
    key: kernelId => `air-nb-subshells:${kernelId}`,

    put: (kernelId, id) =>
      id &&
      memory.attempt(() => {
        const ids = (sessionStorage.getItem(leftovers.key(kernelId)) ?? '').split(' ').filter(Boolean);
        sessionStorage.setItem(leftovers.key(kernelId), [...ids, id].join(' '));
      }),

    take: kernelId =>
      memory.attempt(() => {
        const ids = sessionStorage.getItem(leftovers.key(kernelId));
        sessionStorage.removeItem(leftovers.key(kernelId));
        return (ids ?? '').split(' ').filter(Boolean);
      }) || [],
  };

  // ------------------------------------------------------------------------------------------- the way to a kernel

  /**
   * A connection of our own to a kernel: the control channel makes a subshell, the subshell carries one comm. Nothing
   * here waits for the main shell, unless the kernel has no subshells.
   */
  class KernelSocket {
    /**
     * @param {object} settings of the server
     * @param {string} kernelId
     * @param {{onMessage: function(object), onClose: function(), onGone: function(string)}} events
     *   `onClose`: the connection broke; `onGone`: the kernel, or air_nb in it, is gone, and why: a key of HINTS
     */
    constructor(settings, kernelId, events) {
      this.events = events;
      this.kernelId = kernelId;
      this.session = randomId();
      this.commId = randomId();
      this.subshell = null;
      this.waiting = new Map();
      this.isOpen = false;
      const token = settings.token ? `&token=${encodeURIComponent(settings.token)}` : '';
      const path = `api/kernels/${encodeURIComponent(kernelId)}/channels?session_id=${this.session}${token}`;
      this.socket = new settings.WebSocket(settings.wsUrl + path);
      this.socket.onopen = () => this.#open();
      this.socket.onmessage = event => this.#receive(event.data);
      this.socket.onclose = () => {
        leftovers.put(kernelId, this.subshell);
        this.#end(() => events.onClose());
      };
    }

    async #open() {
      const reply = await this.#ask('create_subshell_request', 'control', {});
      // A kernel that refuses: the comm lives in the main shell and answers between cells.
      this.subshell = reply.status === 'ok' ? reply.subshell_id : null;
      if (this.socket.readyState !== WebSocket.OPEN) return;
      for (const old of leftovers.take(this.kernelId))
        this.#post('delete_subshell_request', 'control', { subshell_id: old });
      this.isOpen = true;
      this.#post('comm_open', 'shell', { comm_id: this.commId, target_name: PANEL_TARGET, data: {} });
    }

    #post(type, channel, content) {
      const header = {
        msg_id: randomId(),
        msg_type: type,
        session: this.session,
        username: 'air_nb',
        version: '5.4',
        date: new Date().toISOString(),
      };
      if (this.subshell && channel === 'shell') header.subshell_id = this.subshell;
      this.socket.send(JSON.stringify({ channel, header, parent_header: {}, metadata: {}, content, buffers: [] }));
      return header.msg_id;
    }

    /** Content of the reply, however late a kernel that is held up gives it. */
    #ask(type, channel, content) {
      return new Promise(resolve => this.waiting.set(this.#post(type, channel, content), resolve));
    }

    #answer(id, content) {
      const resolve = this.waiting.get(id);
      this.waiting.delete(id);
      resolve?.(content);
    }

    #receive(data) {
      // All output of the kernel comes by here: only what is ours, or says how the kernel is, is worth parsing.
      if (
        typeof data !== 'string' ||
        ![this.session, this.commId, '"execution_state"'].some(each => data.includes(each))
      )
        return;
      const { header, parent_header: parent, content } = JSON.parse(data);
      if (parent?.session === this.session && header.msg_type.endsWith('_reply')) this.#answer(parent.msg_id, content);
      else if (header.msg_type === 'status') this.#onStatus(content.execution_state);
      else if (content?.comm_id === this.commId) this.#onComm(header.msg_type, content.data);
    }

    #onComm(type, data) {
      if (type === 'comm_msg') this.events.onMessage(data);
      if (type === 'comm_close') this.#end(() => this.events.onGone('unloaded'));
    }

    /** A kernel process says `starting` once: what we were connected to is gone. */
    #onStatus(state) {
      if (['starting', 'restarting', 'autorestarting'].includes(state))
        this.#end(() => this.events.onGone('restarted'));
      if (state === 'dead') this.#end(() => this.events.onGone('dead'));
    }

    send(data) {
      if (this.isOpen && this.socket.readyState === WebSocket.OPEN)
        this.#post('comm_msg', 'shell', { comm_id: this.commId, data });
    }

    /** Nothing more is told; what happens in the kernel is none of ours any more. */
    #end(tell) {
      if (this.isEnded) return;
      this.isEnded = true;
      this.isOpen = false;
      this.socket.onclose = this.socket.onmessage = null;
      this.socket.close();
      tell();
    }

    /** Leave the kernel as it was. @param {boolean} isNow the page goes away: don't wait for the subshell to hear it */
    close(isNow) {
      const { socket, subshell } = this;
      if (!this.isOpen || socket.readyState !== WebSocket.OPEN) return this.#end(() => {});
      const farewell = this.#post('comm_close', 'shell', { comm_id: this.commId, data: {} });
      this.isOpen = false;
      this.isEnded = true;
      socket.onclose = null;
      const finish = () => {
        clearTimeout(this.closing);
        socket.onmessage = null;
        if (subshell && socket.readyState === WebSocket.OPEN)
          this.#post('delete_subshell_request', 'control', { subshell_id: subshell });
        // Not at once: the server drops what it has not passed on to the kernel yet when a connection closes.
        if (!isNow) setTimeout(() => socket.close(), FLUSH_MS);
      };
      // The subshell must have heard the farewell before it is deleted: the kernel is idle again after that message.
      socket.onmessage = ({ data }) => {
        if (typeof data !== 'string' || !data.includes(farewell) || !data.includes('"execution_state"')) return;
        const { parent_header: parent, content } = JSON.parse(data);
        if (parent?.msg_id === farewell && content.execution_state === 'idle') finish();
      };
      if (isNow) {
        finish(); // which may be lost, so the page that comes next does it again
        leftovers.put(this.kernelId, subshell);
      } else this.closing = setTimeout(finish, CLOSE_MS);
    }
  }

  /** The panel's model: one kernel, whose connection comes back when it breaks. */
  class KernelLink {
    /**
     * @param {object} settings of the server
     * @param {string} kernelId
     * @param {function(): object} kernelOf the notebook's own connection to its kernel
     * @param {function(string)} onGone see KernelSocket
     */
    constructor(settings, kernelId, kernelOf, onGone) {
      this.settings = settings;
      this.kernelId = kernelId;
      this.kernelOf = kernelOf;
      this.onGone = onGone;
      this.listeners = new Set();
      this.hasHeard = false;
      this.retry_ms = FIRST_RETRY_MS;
      this.retryNow = () => this.timer && document.visibilityState === 'visible' && this.#retry();
      window.addEventListener('online', this.retryNow);
      document.addEventListener('visibilitychange', this.retryNow);
      this.connect();
    }

    connect() {
      clearTimeout(this.timer);
      this.timer = null;
      this.socket?.close(false);
      if (this.socket) this.#tell({ type: 'connection', state: 'renewed' });
      this.socket = new KernelSocket(this.settings, this.kernelId, {
        onMessage: message => this.#onMessage(message),
        onClose: () => this.#onClose(),
        onGone: why => this.onGone(why),
      });
    }

    #onMessage(message) {
      this.hasHeard = true;
      this.retry_ms = FIRST_RETRY_MS;
      this.#tell(message);
    }

    #onClose() {
      this.#tell({ type: 'connection', state: 'lost' });
      this.timer = setTimeout(() => this.#retry(), this.retry_ms);
      this.retry_ms = Math.min(2 * this.retry_ms, LAST_RETRY_MS);
    }

    /** After the notebook's own connection: the server drops the output that it keeps for that one if ours is first. */
    #retry() {
      clearTimeout(this.timer);
      if (this.kernelOf()?.connectionStatus === 'connected') this.connect();
      else this.timer = setTimeout(() => this.#retry(), FIRST_RETRY_MS);
    }

    #tell(message) {
      for (const listener of [...this.listeners]) listener(message);
    }

    send(message) {
      this.socket.send(message);
    }

    onMessage(listener) {
      this.listeners.add(listener);
      return () => this.listeners.delete(listener);
    }

    close(isNow) {
      clearTimeout(this.timer);
      window.removeEventListener('online', this.retryNow);
      document.removeEventListener('visibilitychange', this.retryNow);
      this.socket.close(isNow);
    }
  }

  // ----------------------------------------------------------------------------------------------------- the sidebar

  const sessionOf = widget => {
    const context = widget?.sessionContext ?? widget?.context?.sessionContext;
    return context?.session?.kernel || context?.kernelPreference?.canStart ? context : null;
  };

  /** What stands in the panel: a hint, or the panel of a kernel. */
  class Host {
    constructor(app, node) {
      this.app = app;
      this.settings = app.serviceManager.serverSettings;
      this.hint = node.appendChild(document.createElement('p'));
      this.hint.className = 'air-nb-hint';
      this.hint.setAttribute('role', 'status');
      this.root = node.appendChild(document.createElement('div'));
      this.context = null;
      this.link = null;
      this.gone = new Map(); // kernel id -> why it is no longer connected
      this.seen = new WeakSet(); // contexts that are listened to
      this.look = this.look.bind(this);
      app.shell.currentChanged?.connect(this.look);
      window.addEventListener('pagehide', () => this.#detach({ isNow: true }));
      window.addEventListener('pageshow', this.look);
      this.look();
    }

    get kernel() {
      return this.context?.session?.kernel ?? null;
    }

    /** Follow the current notebook; what has no kernel, such as a terminal, leaves the one before. */
    look() {
      const current = sessionOf(this.app.shell.currentWidget);
      if (current) this.context = current;
      if (this.context?.isDisposed) this.context = null;
      if (this.context) this.#listen(this.context);
      this.#choose();
    }

    #listen(context) {
      if (context.session?.kernel) this.#register(context.session.kernel);
      if (this.seen.has(context)) return;
      this.seen.add(context);
      context.kernelChanged.connect(this.look);
      context.disposed.connect(this.look);
      context.statusChanged.connect((_, status) => this.#onStatus(context, status));
    }

    /** The kernel tells this page that air_nb is loaded, or that it wants to be seen. */
    #register(kernel) {
      if (this.seen.has(kernel)) return;
      this.seen.add(kernel);
      kernel.registerCommTarget(ANNOUNCE_TARGET, (comm, message) => {
        comm.onMsg = comm.onClose = () => {};
        const { reveal, hide } = message.content.data ?? {};
        this.announce(kernel.id, { isAgain: !hide });
        if (reveal) window.airNb.show();
        if (hide) window.airNb.hide();
      });
    }

    #onStatus(context, status) {
      const id = context.session?.kernel?.id;
      if (id && ['restarting', 'autorestarting'].includes(status)) this.#forget(id, 'restarted');
      else if (id && status === 'dead') this.#forget(id, 'dead');
      else this.look();
    }

    /** A kernel has air_nb. @param {boolean} isAgain maybe another one than what is connected: after %reload_ext */
    announce(id, { isAgain = false } = {}) {
      memory.add(id);
      this.gone.delete(id);
      if (this.link?.kernelId !== id) this.look();
      else if (isAgain) this.link.connect();
    }

    #forget(id, why) {
      memory.remove(id);
      this.gone.set(id, why);
      if (this.link?.kernelId === id) this.#detach();
      this.#choose();
    }

    #choose() {
      const id = this.kernel?.id;
      if (this.link && this.link.kernelId !== id) this.#detach();
      if (!id) this.#say(this.context ? 'noKernel' : 'none');
      else if (!this.link && memory.has(id)) this.#attach(id);
      else if (!this.link) this.#say(this.gone.get(id) ?? (this.kernel.status === 'busy' ? 'busy' : 'unknown'));
    }

    #attach(id) {
      const link = new KernelLink(
        this.settings,
        id,
        () => this.kernel,
        why => this.#forget(id, why),
      );
      this.link = link;
      this.#say('connecting');
      link.onMessage(() => this.link === link && this.#say(null));
      setTimeout(() => this.link === link && !link.hasHeard && this.#say('waiting'), SAY_BUSY_MS);
      this.#mount(link);
    }

    async #mount(link) {
      try {
        const { mount } = await import(PANEL_JS);
        if (this.link === link) this.unmount = mount(link, this.root);
      } catch (error) {
        console.error('air_nb: the panel could not be loaded', error);
        if (this.link === link) this.#say('broken');
      }
    }

    #detach({ isNow = false } = {}) {
      this.unmount?.();
      this.unmount = null;
      this.link?.close(isNow);
      this.link = null;
    }

    #say(which) {
      const text = which ? HINTS[which] : '';
      if (this.hint.textContent !== text) this.hint.textContent = text;
      this.hint.hidden = !text;
      this.root.hidden = Boolean(text);
    }
  }

  const addStyle = () => {
    const link = document.createElement('link');
    link.rel = 'stylesheet';
    link.href = PANEL_CSS;
    document.head.append(link);
  };

  const makePanel = Widget => {
    const panel = new Widget();
    panel.id = ID;
    panel.title.caption = TITLE;
    panel.title.iconClass = 'air-nb-icon';
    panel.node.classList.add('air-nb-sidebar');
    panel.node.setAttribute('role', 'region');
    panel.node.setAttribute('aria-label', TITLE);
    return panel;
  };

  const activate = async (app, Widget) => {
    memory.prune();
    addStyle();
    const panel = makePanel(Widget);
    app.shell.add(panel, 'right', { rank: 900 });
    const host = new Host(app, panel.node);
    window.airNb = {
      show: () => app.shell.activateById(ID),
      hide: () => app.shell.collapseRight?.(),
      isVisible: () => panel.isVisible,
      announce: kernelId => host.announce(kernelId),
    };
    await app.restored;
    // Lab restores only what it has a token for.
    if (memory.attempt(() => sessionStorage.getItem(ID))) window.airNb.show();
    window.addEventListener('pagehide', () =>
      memory.attempt(() => (panel.isVisible ? sessionStorage.setItem(ID, '1') : sessionStorage.removeItem(ID))),
    );
    host.look();
  };

  // --------------------------------------------------------------------------------------------------- the container

  let shared = null;
  const load = async name => {
    const versions = shared[name];
    const factory = await versions[Object.keys(versions)[0]].get();
    return factory();
  };
  return {
    init: scope => {
      shared = scope;
    },
    get: async () => {
      const { Widget } = await load('@lumino/widgets');
      const plugin = {
        id: 'air-nb:plugin',
        description: TITLE,
        autoStart: true,
        activate: app => void activate(app, Widget),
      };
      return () => ({ __esModule: true, default: plugin });
    },
  };
})();
