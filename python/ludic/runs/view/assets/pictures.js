// Only in pages with images: where a text has the words for an image, its thumbnail follows them.
const IMAGE = /(\[image [^\]\s]+ [0-9a-f]{8}\.\.\.\])/;
const makeTurnOfText = Browser.prototype.makeTurn;

Browser.prototype.makeTurn = function makeTurn(...turn) {
  const nodes = makeTurnOfText.apply(this, turn);
  for (const node of nodes) if (node.className === 'text') node.replaceChildren(...showPictures(node.textContent));
  return nodes;
};

function showPictures(text) {
  return text.split(IMAGE).map((part) => (Object.hasOwn(data.pictures, part) ? element('img', {src: data.pictures[part], alt: part, title: part}) : part));
}
