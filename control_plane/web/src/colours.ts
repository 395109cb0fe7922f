/** The page's colours for canvases: `light-dark()` is resolved by the style of an element. */
export function colours(node: HTMLElement): (name: string) => string {
  const found = new Map<string, string>()
  return name => {
    let colour = found.get(name)
    if (!colour) {
      const before = node.style.color
      node.style.color = `var(--${name})`
      colour = getComputedStyle(node).color
      node.style.color = before
      found.set(name, colour)
    }
    return colour
  }
}
