// Sampled episodes: a list of any length, of which only the visible rows exist, and one episode turn by turn.
const ROW = 30;
const [RUN, POLICY, PROBLEM, GROUP, REWARD, FLAGS, TURNS, ERROR] = [0, 1, 2, 3, 4, 5, 6, 7];
const FLAG_NAMES = {c: ['cut off', 'an answer reached its token limit'], p: ['refused', 'the parser refused an answer'],
  t: ['truncated', 'the episode was ended before its end']};
const ORDERS = {log: 'as logged', low: 'lowest reward first', high: 'highest reward first', surprise: 'most surprising tokens first',
  mismatch: 'largest mismatch first', long: 'longest first'};

const meanLogp = (row) => {
  let sum = 0, count = 0;
  for (const turn of row[TURNS]) for (const value of turn[7]) if (value !== null) { sum -= value / 100; count++; }
  return count ? sum / count : null;
};
const countTokens = (row) => row[TURNS].reduce((sum, turn) => sum + Math.max(turn[6].length, turn[7].length), 0);
const worstMismatch = (row) => row[TURNS].reduce((worst, turn) => turn[8].reduce((most, value) => Math.max(most, Math.abs(value ?? 0)), worst), 0) / 1000;
const hasFailed = (row) => row[ERROR] !== undefined;
const isRight = (row) => (hasFailed(row) || data.runs[row[RUN]].solved === null || data.runs[row[RUN]].solved === undefined ? null : row[REWARD] >= data.runs[row[RUN]].solved);

const FILTERS = {
  all: ['all', () => true],
  failed: ['failed: wrong, cut off, refused or an error', (row) => isRight(row) === false || /[cp]/.test(row[FLAGS]) || hasFailed(row)],
  right: ['right', (row) => isRight(row) === true],
  wrong: ['wrong', (row) => isRight(row) === false],
  cut: ['cut off at the token limit', (row) => row[FLAGS].includes('c')],
  error: ['ended by an error', hasFailed],
  refused: ['refused by the parser', (row) => row[FLAGS].includes('p')],
  turns: ['of several turns', (row) => row[TURNS].length > 1],
  praised: ['reward above its group', (row) => row[GROUP] !== null && row[REWARD] > groupMean(row) + 1e-9],
  blamed: ['reward below its group', (row) => row[GROUP] !== null && row[REWARD] < groupMean(row) - 1e-9],
};

const groups = new Map();
data.episodes.forEach((row, place) => {
  if (row[GROUP] === null) return;
  const key = `${row[RUN]} ${row[GROUP]}`;
  if (!groups.has(key)) groups.set(key, []);
  groups.get(key).push(place);
});
const groupOf = (row) => (row[GROUP] === null ? [] : groups.get(`${row[RUN]} ${row[GROUP]}`));
const groupMean = (row) => { const group = groupOf(row); return group.reduce((sum, place) => sum + data.episodes[place][REWARD], 0) / group.length; };

class Browser {
  constructor() {
    this.places = [];
    this.chosen = null;
    this.filter = choice('filter', Object.entries(FILTERS).map(([key, [name]]) => [key, name]), () => this.apply());
    this.order = choice('order', Object.entries(ORDERS), () => this.apply());
    this.colours = choice('colour of tokens', [['logp', 'log-probability'], ['credit', 'advantage'], ['mismatch', 'mismatch'], ['none', 'none']], () => this.open(this.chosen));
    this.search = element('input', {type: 'search', placeholder: 'text of an answer or prompt', 'aria-label': 'search in episodes', input: () => this.apply()});
    this.count = element('span', {class: 'soft small', 'aria-live': 'polite'});
    this.inner = element('div', {});
    this.list = element('div', {class: 'list', tabindex: '0', role: 'listbox', 'aria-label': 'episodes', scroll: () => this.draw(), keydown: (event) => this.move(event)}, this.inner);
    this.detail = element('div', {class: 'detail', tabindex: '0', 'aria-label': 'the chosen episode'});
    this.readout = element('div', {class: 'readout mono', 'aria-live': 'polite'});
    whenShown(() => this.apply());
    this.apply();
  }

  apply() {
    const keep = FILTERS[this.filter.value][1], wanted = this.search.value.toLowerCase();
    this.places = [];
    data.episodes.forEach((row, place) => {
      if (shown.has(row[RUN]) && keep(row) && (!wanted || row[ERROR]?.toLowerCase().includes(wanted) || row[TURNS].some((turn) => turn[1].toLowerCase().includes(wanted) || turn[0].toLowerCase().includes(wanted)))) this.places.push(place);
    });
    const key = {low: (row) => row[REWARD] ?? -Infinity, high: (row) => -(row[REWARD] ?? -Infinity), surprise: (row) => meanLogp(row) ?? 0,
      mismatch: (row) => -worstMismatch(row), long: (row) => -countTokens(row)}[this.order.value];
    if (key) {
      const keys = new Map(this.places.map((place) => [place, key(data.episodes[place])]));
      this.places.sort((one, two) => (keys.get(one) > keys.get(two)) - (keys.get(one) < keys.get(two)) || one - two);
    }
    const total = data.runs.reduce((sum, run) => sum + run.logged, 0);
    const of = total > data.episodes.length ? `; the logs have ${format(total)}` : '';
    this.count.textContent = `${format(this.places.length)} of ${format(data.episodes.length)} episodes${of}`;
    this.inner.style.setProperty('height', `${this.places.length * ROW}px`);
    this.list.scrollTop = 0;
    this.open(this.places.includes(this.chosen) ? this.chosen : this.places[0] ?? null);
  }

  draw() {
    const first = Math.max(0, Math.floor(this.list.scrollTop / ROW) - 5), last = Math.min(this.places.length, first + Math.ceil(this.list.clientHeight / ROW) + 10);
    this.inner.replaceChildren(...this.places.slice(first, last).map((place, number) => this.makeRow(place, first + number)));
  }

  makeRow(place, number) {
    const row = data.episodes[place], right = isRight(row), logp = meanLogp(row);
    const node = element('div', {class: 'row', role: 'option', id: `row${number}`, 'aria-selected': String(place === this.chosen), 'aria-setsize': this.places.length,
      'aria-posinset': number + 1, click: () => { this.open(place); this.list.focus(); }},
    swatch(row[RUN]), element('span', {class: 'value', title: 'reward'}, hasFailed(row) ? '' : `${right === null ? '' : right ? '✓ ' : '✗ '}${format(row[REWARD])}`),
    element('span', {class: 'value soft', title: 'mean log-probability of a token'}, logp === null ? '' : logp.toFixed(2)),
    element('span', {class: 'value soft', title: 'tokens'}, `${countTokens(row)} t`),
    element('span', {class: 'what'}, `${row[TURNS].length ? `${lastLine(row[TURNS][0][0])} → ${row[TURNS].map((turn) => turn[1]).join(' | ')}` : row[ERROR] ?? ''}`.replace(/\s+/g, ' ').slice(0, 200)),
    hasFailed(row) ? element('span', {class: 'flag', title: row[ERROR]}, 'error') : null,
    [...row[FLAGS]].filter((flag) => flag !== 't').map((flag) => element('span', {class: 'flag', title: FLAG_NAMES[flag][1]}, FLAG_NAMES[flag][0])));
    node.style.setProperty('top', `${number * ROW}px`);
    return node;
  }

  move(event) {
    const page = Math.max(1, Math.floor(this.list.clientHeight / ROW) - 1);
    const by = {ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity}[event.key];
    if (by === undefined || !this.places.length) return;
    event.preventDefault();
    const now = Math.max(0, this.places.indexOf(this.chosen)), next = Math.min(this.places.length - 1, Math.max(0, now + by));
    if (next * ROW < this.list.scrollTop) this.list.scrollTop = next * ROW;
    if ((next + 1) * ROW > this.list.scrollTop + this.list.clientHeight) this.list.scrollTop = (next + 1) * ROW - this.list.clientHeight;
    this.open(this.places[next]);
  }

  open(place) {
    this.chosen = place;
    this.draw();
    this.list.setAttribute('aria-activedescendant', place === null ? '' : `row${this.places.indexOf(place)}`);
    this.readout.textContent = '';
    if (place === null || place === undefined) return void this.detail.replaceChildren(element('p', {class: 'soft'}, 'No episode passes the filter.'));
    const row = data.episodes[place], logp = meanLogp(row);
    const facts = [hasFailed(row) ? 'failed after all retries, and in no reward' : `reward ${format(row[REWARD])}`, hasFailed(row) ? null : `${countTokens(row)} tokens`,
      worstMismatch(row) ? `largest mismatch ${format(worstMismatch(row))}` : null, logp === null ? null : `mean log-probability ${format(logp)}`,
      row[POLICY] === null ? null : `policy version ${row[POLICY]}`, row[PROBLEM] ? `problem ${row[PROBLEM]}` : null, ...[...row[FLAGS]].map((flag) => FLAG_NAMES[flag][0])];
    this.detail.replaceChildren(...[element('h3', {}, swatch(row[RUN]), ` ${data.runs[row[RUN]].name}`),
      element('p', {class: 'small soft'}, facts.filter(Boolean).join(' · ')), this.makeSiblings(row, place),
      ...row[TURNS].flatMap((turn, number) => this.makeTurn(turn, number, row)), hasFailed(row) ? element('div', {class: 'text error'}, row[ERROR]) : null].filter(Boolean));
    this.detail.scrollTop = 0;
  }

  makeSiblings(row, place) {
    const group = groupOf(row);
    if (group.length < 2) return null;
    return element('div', {}, element('span', {class: 'small soft'}, `group of ${group.length}, mean reward ${format(groupMean(row))}`),
      element('div', {class: 'siblings'}, group.map((other) => element('button', {type: 'button', 'aria-current': String(other === place), click: () => this.open(other)}, format(data.episodes[other][REWARD])))));
  }

  makeTurn([seen, action, next, reward, credit, flags, pieces, logps, mismatches, told, judged], number, row) {
    const several = row[TURNS].length > 1;
    const facts = [several ? `turn ${number + 1}` : null, several ? `reward ${format(reward)}` : null, credit === null ? null : `advantage ${format(credit)}`,
      ...told, ...[...flags].filter((flag) => flag !== 't').map((flag) => FLAG_NAMES[flag][0])].filter(Boolean).join(' · ');
    const isLast = number === row[TURNS].length - 1;
    return [number === 0 || row[TURNS][number - 1][2] !== seen ? element('div', {class: 'text'}, seen) : null,
      element('div', {class: 'small soft'}, facts), element('div', {class: 'text answer'}, this.makeTokens(action, pieces, logps, credit, mismatches)),
      judged ? element('details', {class: 'small soft'}, element('summary', {}, 'what the judge was asked, and its verdict'), element('div', {class: 'text'}, judged)) : null,
      next && (!isLast || !row[FLAGS].includes('c')) ? element('div', {class: 'text'}, next) : null].filter(Boolean);
  }

  makeTokens(action, pieces, logps, credit, mismatches) {
    if (!pieces.length || pieces.length !== logps.length) return action;
    const tokens = pieces.map((piece, place) => {
      const text = data.pieces[piece], logp = logps[place] === null ? null : -logps[place] / 100, gap = mismatches[place] ?? null;
      const known = logp === null ? 'no finite log-probability' : `log-probability ${logp.toFixed(2)}, probability ${(100 * Math.exp(logp)).toFixed(1)} %`;
      const tell = () => { this.readout.textContent = `${JSON.stringify(text)}  ${known}${gap === null ? '' : `, trainer minus sampler ${(gap / 1000).toFixed(3)}`}`; };
      return element('span', {class: `token ${this.shade(logp, credit, gap)}${action.includes(text) ? '' : ' unsaid'}`, mouseenter: tell}, text);
    });
    return tokens;
  }

  shade(logp, credit, gap) {
    if (this.colours.value === 'logp') return logp === null ? 's8' : `s${Math.min(8, Math.floor(-logp * 1.6))}`;
    if (this.colours.value === 'mismatch') return gap === null || Math.abs(gap) < 1 ? '' : `${gap > 0 ? 'p' : 'n'}${Math.min(4, 1 + Math.floor(Math.log10(Math.abs(gap))))}`;
    if (this.colours.value !== 'credit' || !credit) return '';
    return `${credit > 0 ? 'p' : 'n'}${Math.min(4, Math.ceil(Math.abs(credit) * 2))}`;
  }
}

const lastLine = (text) => text.trim().split('\n').at(-1);

function choice(label, options, change) {
  return element('select', {'aria-label': label, change}, options.map(([value, name]) => element('option', {value}, name)));
}

function makeLegend() {
  const heat = [0, 1, 2, 3, 4, 5, 6, 7, 8].map((level) => element('span', {class: `s${level}`}, level % 4 ? '\u00a0' : `${(-level / 1.6).toFixed(1)}`));
  const credit = ['n4', 'n2', '', 'p2', 'p4'].map((level, place) => element('span', {class: level}, ['≤ -2', '', '0', '', '≥ 2'][place] || '\u00a0'));
  const gaps = ['n4', 'n3', 'n2', 'n1', '', 'p1', 'p2', 'p3', 'p4'].map((level, place) => element('span', {class: level}, {0: '≤ -1', 2: '-0.01', 4: '0', 6: '0.01', 8: '≥ 1'}[place] ?? '\u00a0'));
  return element('div', {class: 'bar small soft'}, element('span', {}, 'log-probability ', element('span', {class: 'legend'}, heat)),
    element('span', {}, 'advantage ', element('span', {class: 'legend'}, credit)),
    element('span', {title: 'trainer\'s log-probability minus the sampler\'s, in nats'}, 'mismatch ', element('span', {class: 'legend'}, gaps)));
}

function makeEpisodes() {
  if (!data.episodes.length) {
    return section('episodes', 'Episodes', element('p', {class: 'soft'}, 'The runs have logged no episodes; rollout.log_every=1 logs those of every step.'));
  }
  const browser = new Browser();
  const label = (name, node) => element('label', {}, name, node);
  document.addEventListener('keydown', (event) => {
    if (event.key === '/' && !event.target.closest('input, select, textarea')) { event.preventDefault(); browser.search.focus(); }
  });
  requestAnimationFrame(() => browser.draw());
  return section('episodes', 'Episodes', element('div', {class: 'bar'}, label('show', browser.filter), label('order', browser.order),
    label('colour', browser.colours), label('search', browser.search), browser.count), makeLegend(),
  element('div', {class: 'browser'}, browser.list, browser.detail), browser.readout,
  element('p', {class: 'soft small'}, 'Keys: / searches; in the list, the arrows, Page Up and Down, Home and End choose an episode.'));
}
