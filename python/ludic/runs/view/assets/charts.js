// Line charts of the metrics, one run over another, and dots with intervals for held-out rates.
const WIDTH = 560, HEIGHT = 250, LEFT = 54, RIGHT = 12, TOP = 10, BOTTOM = 24;

/** Round steps of 1, 2 or 5 times a power of ten that divide [low, high] into about `count`. */
function ticks(low, high, count) {
  const span = (high - low) || 1, power = 10 ** Math.floor(Math.log10(span / count));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => span / size <= count);
  const first = Math.ceil(low / step - 1e-9), marks = [];
  for (let place = first; place * step <= high + step * 1e-9; place++) marks.push(Number((place * step).toPrecision(12)));
  return marks;
}

function powers(low, high) {
  const marks = [];
  for (let power = Math.floor(Math.log10(low)); 10 ** power <= high * 1.0001; power++) if (10 ** power >= low * 0.9999) marks.push(10 ** power);
  return marks.length > 1 ? marks : [low, high];
}

/** Exponential mean with the bias of its start removed; a gap keeps the mean as it is. */
function smooth(values, weight) {
  let sum = 0, norm = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = sum * weight + value * (1 - weight);
    norm = norm * weight + (1 - weight);
    return sum / norm;
  });
}

/** The points of a metric in each shown run: [{run, steps, raw, values}]. */
function findCurves(phase, metric, options) {
  const curves = [];
  for (const run of shown) {
    const series = data.runs[run].series[phase];
    const values = series && series.values[metric];
    if (!values) continue;
    const usable = values.map((value) => (value === undefined || (options.log && value <= 0) ? null : value));
    curves.push({run, steps: series.steps, raw: usable, values: smooth(usable, options.smoothing)});
  }
  return curves.sort((one, two) => one.run - two.run);
}

/** A path through the points; single points between gaps are joined, as evaluations have gaps. */
function trace(steps, values, x, y) {
  let path = '';
  values.forEach((value, place) => {
    if (value !== null) path += `${path ? 'L' : 'M'}${x(steps[place]).toFixed(1)},${y(value).toFixed(1)}`;
  });
  return path;
}

function limits(numbers) {
  let low = Infinity, high = -Infinity;
  for (const number of numbers) { if (number < low) low = number; if (number > high) high = number; }
  return [low, high];
}

class Chart {
  constructor(metric, options, onClose) {
    this.metric = metric;
    this.options = options;
    this.at = null;
    this.select = element('select', {'aria-label': 'metric', change: () => { this.metric = this.select.value; this.draw(); }});
    this.plot = element('div', {tabindex: '0', role: 'img', class: 'plot', keydown: (event) => this.move(event),
      mousemove: (event) => this.point(event), mouseleave: () => this.look(null)});
    this.readout = element('div', {class: 'readout', 'aria-live': 'polite'});
    const close = element('button', {type: 'button', 'aria-label': 'remove this chart', title: 'Remove this chart', click: onClose}, '×');
    this.node = element('div', {class: 'chart'}, element('div', {class: 'bar'}, this.select, close), this.plot, this.readout);
  }

  offer(metrics) {
    const wanted = metrics.includes(this.metric) ? metrics : [this.metric, ...metrics];
    this.select.replaceChildren(...wanted.map((name) => element('option', {value: name, selected: name === this.metric}, name)));
  }

  draw() {
    this.curves = findCurves(this.options.phase, this.metric, this.options);
    const values = this.curves.flatMap((curve) => curve.raw.filter((value) => value !== null));
    this.at = null;
    if (!values.length) {
      this.plot.replaceChildren(element('p', {class: 'soft small'}, 'No shown run has this metric in this phase.'));
      this.readout.replaceChildren();
      return;
    }
    let [low, high] = limits(values);
    if (low === high) { low -= Math.abs(low) * 0.1 || 0.5; high += Math.abs(high) * 0.1 || 0.5; }
    const [first, last] = limits(this.curves.flatMap((curve) => curve.steps));
    const log = this.options.log && low > 0;
    const scale = log ? Math.log : (value) => value;
    const pad = (scale(high) - scale(low)) * 0.04;
    const [bottom, top] = [scale(low) - pad, scale(high) + pad];
    this.x = (step) => LEFT + ((step - first) / ((last - first) || 1)) * (WIDTH - LEFT - RIGHT);
    this.y = (value) => HEIGHT - BOTTOM - ((scale(value) - bottom) / (top - bottom)) * (HEIGHT - TOP - BOTTOM);
    const svg = drawn('svg', {viewBox: `0 0 ${WIDTH} ${HEIGHT}`});
    for (const mark of log ? powers(low, high) : ticks(low, high, 5)) {
      svg.append(drawn('line', {class: 'grid', x1: LEFT, x2: WIDTH - RIGHT, y1: this.y(mark), y2: this.y(mark)}),
        drawn('text', {x: LEFT - 6, y: this.y(mark) + 4, 'text-anchor': 'end'}, format(mark)));
    }
    for (const mark of ticks(first, last, 6)) {
      svg.append(drawn('text', {x: this.x(mark), y: HEIGHT - 8, 'text-anchor': 'middle'}, format(mark)));
    }
    for (const curve of this.curves) svg.append(...this.line(curve));
    this.cross = drawn('g');
    svg.append(this.cross);
    this.plot.replaceChildren(svg);
    this.plot.setAttribute('aria-label', `${this.metric} by step; the arrow keys read its values`);
    this.look(null);
  }

  line(curve) {
    const common = {stroke: colour(curve.run), 'stroke-dasharray': dashes(curve.run)};
    const points = curve.values.filter((value) => value !== null).length;
    const parts = [drawn('path', {class: 'curve', ...common, d: trace(curve.steps, curve.values, this.x, this.y)})];
    if (this.options.smoothing > 0) parts.unshift(drawn('path', {class: 'raw', ...common, d: trace(curve.steps, curve.raw, this.x, this.y)}));
    if (points <= 40) {
      curve.values.forEach((value, place) => {
        if (value !== null) parts.push(drawn('circle', {cx: this.x(curve.steps[place]), cy: this.y(value), r: 2.5, fill: colour(curve.run)}));
      });
    }
    return parts;
  }

  point(event) {
    if (!this.curves.length) return;
    const box = this.plot.getBoundingClientRect();
    const wanted = ((event.clientX - box.left) / box.width) * WIDTH;
    let best = null;
    for (const curve of this.curves) {
      curve.steps.forEach((step, place) => {
        if (curve.raw[place] !== null && (best === null || Math.abs(this.x(step) - wanted) < Math.abs(this.x(best) - wanted))) best = step;
      });
    }
    this.look(best);
  }

  move(event) {
    const direction = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    if (!direction || !this.curves.length) return;
    event.preventDefault();
    const steps = [...new Set(this.curves.flatMap((curve) => curve.steps.filter((_, place) => curve.raw[place] !== null)))].sort((a, b) => a - b);
    const place = this.at === null ? (direction > 0 ? 0 : steps.length - 1) : steps.indexOf(this.at) + direction;
    if (place >= 0 && place < steps.length) this.look(steps[place]);
  }

  look(step) {
    this.at = step;
    if (!this.cross) return;
    this.cross.replaceChildren();
    if (step === null) {
      this.readout.replaceChildren(element('span', {class: 'soft'}, 'step'));
      return;
    }
    this.cross.append(drawn('line', {class: 'cross', x1: this.x(step), x2: this.x(step), y1: TOP, y2: HEIGHT - BOTTOM}));
    const said = [element('span', {class: 'soft'}, `step ${step}`)];
    for (const curve of this.curves) {
      const place = curve.steps.indexOf(step), value = place < 0 ? null : curve.raw[place];
      if (value === null) continue;
      this.cross.append(drawn('circle', {cx: this.x(step), cy: this.y(curve.values[place]), r: 4, fill: colour(curve.run)}));
      const smoothed = this.options.smoothing > 0 ? ` (smoothed ${format(curve.values[place])})` : '';
      said.push(element('span', {}, swatch(curve.run), ` ${data.runs[curve.run].name} ${format(value)}${smoothed}`));
    }
    this.readout.replaceChildren(...said);
  }
}
