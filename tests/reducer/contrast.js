// Of all elements with text of their own, the least contrast to what is behind them.
() => {
  const parsed = (text) => text.match(/[0-9.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((one) => one / 255)
    .map((one) => (one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4))
    .reduce((sum, one, at) => sum + one * [0.2126, 0.7152, 0.0722][at], 0);
  const behind = (node) => {
    for (let each = node; each; each = each.parentElement) {
      const found = parsed(getComputedStyle(each).backgroundColor);
      if (found.length === 3 || found[3] === 1) {
        return found;
      }
    }
    return [255, 255, 255];
  };
  let worst = { ratio: 21 };
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some((one) => one.nodeType === 3 && one.data.trim());
    if (own && node.getClientRects().length) {
      const [a, b] = [light(parsed(getComputedStyle(node).color)), light(behind(node))];
      const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
      worst = ratio < worst.ratio ? { ratio, text: node.textContent } : worst;
    }
  }
  return worst;
}
