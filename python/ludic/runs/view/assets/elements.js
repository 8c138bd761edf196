// Small helpers: elements and numbers. Texts are set as text only; nothing here parses HTML.
const data = JSON.parse(document.getElementById('data').textContent);
const SVG = 'http://www.w3.org/2000/svg';
const DASHES = ['', '7 4', '2 3', '10 3 2 3'];

/** element('td', {class: 'number'}, 'text', child): an HTML element; functions are listeners. */
function element(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

function drawn(name, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

function fill(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (typeof value === 'function') node.addEventListener(key, value);
    else if (typeof value === 'boolean') node.toggleAttribute(key, value);
    else if (value !== undefined && value !== null) node.setAttribute(key, value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

function colour(run) { return `var(--run${run % 8})`; }

/** The sign of a run: its colour, and its dashes once colours repeat. */
function swatch(run) {
  const line = drawn('line', {x1: 0, x2: 22, y1: 4, y2: 4, stroke: colour(run), 'stroke-width': 4, 'stroke-dasharray': dashes(run)});
  return drawn('svg', {class: 'swatch', viewBox: '0 0 22 8', 'aria-hidden': 'true'}, line);
}

function dashes(run) { return DASHES[Math.floor(run / 8) % DASHES.length] || null; }

/** A number in at most five characters or so: 0.1234, 12.3, 1.2e-5, 12,345. */
function format(value) {
  if (value === null || value === undefined) return '';
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e7) return value.toLocaleString('en');
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2).replace('e+', 'e');
  return size >= 100 ? value.toFixed(1) : String(Number(value.toPrecision(4)));
}

function duration(seconds) {
  if (seconds < 120) return `${Math.round(seconds)} s`;
  return seconds < 7200 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

function setting(value) {
  return value === null || value === undefined ? 'null' : typeof value === 'string' ? value : JSON.stringify(value);
}

/** A section with a heading, which the navigation names. */
function section(id, title, ...children) {
  return element('section', {id}, element('h2', {}, title), ...children);
}

/** Which runs are shown, and who is told when that changes. */
const shown = new Set(data.runs.map((_, run) => run));
const listeners = [];
function whenShown(listener) { listeners.push(listener); }
function show(run, isShown) {
  if (isShown) shown.add(run); else shown.delete(run);
  listeners.forEach((listener) => listener());
}
